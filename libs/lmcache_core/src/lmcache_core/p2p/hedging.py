"""When a second holder is asked for what the first has not brought: past the p95 of such pulls,
and seldom.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW: Final = 64
"""Pulls of one size class that are remembered."""
MIN_SAMPLES: Final = 16
MAX_SIZE_CLASS: Final = 12
QUANTILE: Final = 0.95
MIN_HEDGE_S: Final = 0.005
"""Below this a second question costs more than the wait that it saves."""
UNKNOWN_SHARE: Final = 0.25
"""Of the time that is left, while too few pulls are known."""
MAX_HEDGES_SAVED: Final = 5.0
HEDGES_PER_PULL: Final = 0.1
"""A slow network makes all pulls late; asking every peer twice then makes it slower."""


class PullTimes:
    """How long pulls took, by size class: chunks to the power of two."""

    def __init__(self) -> None:
        self._classes: list[deque[float]] = [
            deque(maxlen=WINDOW) for _ in range(MAX_SIZE_CLASS + 1)
        ]

    def observe(self, num_chunks: int, elapsed_s: float) -> None:
        """A pull of so many chunks took that long, or was given up after that long because
        another peer was faster.
        """
        self._classes[_size_class(num_chunks)].append(elapsed_s)

    def hedge_s(self, num_chunks: int, left_s: float) -> float:
        """After how many seconds a pull is late.

        Args:
            num_chunks: What it is to bring.
            left_s: Time until its deadline.
        """
        samples = sorted(self._classes[_size_class(num_chunks)])
        if len(samples) < MIN_SAMPLES:
            return max(MIN_HEDGE_S, left_s * UNKNOWN_SHARE)
        return max(MIN_HEDGE_S, samples[min(len(samples) - 1, int(len(samples) * QUANTILE))])


class HedgeBudget:
    """How many pulls may be doubled: one in ten over time, a few at once."""

    def __init__(self) -> None:
        self._saved = MAX_HEDGES_SAVED

    def earn(self) -> None:
        """A pull begins."""
        self._saved = min(MAX_HEDGES_SAVED, self._saved + HEDGES_PER_PULL)

    def spend(self) -> bool:
        """Whether this pull may be doubled."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


def _size_class(num_chunks: int) -> int:
    return min(MAX_SIZE_CLASS, num_chunks.bit_length())
