"""Timing: several rounds, medians, and a limit taken in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 7
GB = 1e9


@dataclass(frozen=True)
class Figure:
    """One row: what was moved, how fast, and what the machine could have done.

    Attributes:
        name: What was measured.
        num_bytes: Bytes moved in a round.
        seconds: Each round.
        limit: Figure of the limit that this one is held against; None for a limit itself.
        note: What limits it.
        beside: Seconds of the limit's work, done in turn with each round: noise then hits both
            alike. Empty when `limit` says it all.
    """

    name: str
    num_bytes: int
    seconds: tuple[float, ...]
    limit: Figure | None = None
    note: str = ""
    beside: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Median, GB/s (10^9 bytes)."""
        return self.num_bytes / statistics.median(self.seconds) / GB

    @property
    def spread(self) -> tuple[float, float]:
        """Slowest and fastest round, GB/s."""
        return self.num_bytes / max(self.seconds) / GB, self.num_bytes / min(self.seconds) / GB

    @property
    def share(self) -> float | None:
        """Rate as a share of the limit's: the median over rounds measured in turn, or the ratio
        of the medians.
        """
        if self.beside:
            return statistics.median(
                limit / mine for limit, mine in zip(self.beside, self.seconds, strict=True)
            )
        return None if self.limit is None else self.rate / self.limit.rate


def timed(
    work: Callable[[int], object],
    prepare: Callable[[int], object] | None = None,
    rounds: int = ROUNDS,
) -> tuple[float, ...]:
    """Seconds of each round, after one that does not count.

    Args:
        work: Measured; given the round's number.
        prepare: Run before it, not measured.
        rounds: How many count.
    """
    seconds = []
    for turn in range(rounds + 1):
        if prepare is not None:
            prepare(turn)
        begin = time.perf_counter()
        work(turn)
        seconds.append(time.perf_counter() - begin)
    return tuple(seconds[1:])


def in_turn(
    work: Callable[[int], object],
    limit: Callable[[int], object],
    prepare: Callable[[int], object] | None = None,
    rounds: int = ROUNDS,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each round of `work`, and of the `limit` work done in turn with it; one round of
    both does not count.

    Args:
        work: Measured; given the round's number.
        limit: What it is held against.
        prepare: Run before `work`, not measured.
        rounds: How many count.
    """
    mine, limits = [], []
    for turn in range(rounds + 1):
        if prepare is not None:
            prepare(turn)
        begin = time.perf_counter()
        work(turn)
        middle = time.perf_counter()
        limit(turn)
        limits.append(time.perf_counter() - middle)
        mine.append(middle - begin)
    return tuple(mine[1:]), tuple(limits[1:])
