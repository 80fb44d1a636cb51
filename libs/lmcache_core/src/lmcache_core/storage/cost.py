"""What a read from a tier will cost, learned from what reads have cost.

Seconds are modelled as `latency + bytes * seconds_per_byte`, fitted by least squares over recent
reads whose weight decays. Source of the recurrences: exponentially weighted linear regression (any
text on recursive least squares).
"""

from __future__ import annotations

import threading
from bisect import bisect_right

DECAY = 0.9
"""Weight that an observation loses with each that follows: about the last ten count."""
MIN_OBSERVATIONS = 6
"""More than the failures in a row that open a breaker: a tier that hangs from the start is the
breaker's affair, a slow one is ours.
"""
RECOVERED_FACTOR = 4
NUM_RECOVERED = 2
"""So many reads in a row, each so many times cheaper than expected: the tier is another one now,
and what it cost before is forgotten.
"""


class ReadCost:
    """Learns the cost of reads from one tier. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mean_chunk_bytes = 0.0
        self._num_observed = 0
        self._num_cheap = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_chunks: int, num_bytes: int, elapsed_s: float) -> None:
        """A read brought that many chunks and bytes (perhaps none, when it was given up) in that
        time.
        """
        with self._lock:
            expected_s = self._seconds(num_bytes)
            is_cheap = (
                num_chunks > 0
                and expected_s is not None
                and elapsed_s * RECOVERED_FACTOR < expected_s
            )
            self._num_cheap = self._num_cheap + 1 if is_cheap else 0
            if self._num_cheap == NUM_RECOVERED:
                self._num_observed = self._num_cheap = 0
                self._weight = self._x = self._y = self._xx = self._xy = 0.0
            self._num_observed += 1
            self._weight = self._weight * DECAY + 1
            self._x = self._x * DECAY + num_bytes
            self._y = self._y * DECAY + elapsed_s
            self._xx = self._xx * DECAY + float(num_bytes) * num_bytes
            self._xy = self._xy * DECAY + num_bytes * elapsed_s
            if num_chunks:
                mean = num_bytes / num_chunks
                self._mean_chunk_bytes = (
                    mean
                    if self._mean_chunk_bytes == 0
                    else DECAY * self._mean_chunk_bytes + (1 - DECAY) * mean
                )

    def expected_s(self, num_chunks: int) -> float | None:
        """Seconds that reading so many chunks will take; None while too little is known."""
        with self._lock:
            return self._seconds(num_chunks * self._mean_chunk_bytes)

    def num_within(self, num_chunks: int, limit_s: float) -> int:
        """How many of so many chunks, from the first, a read should bring within `limit_s`; all
        while too little is known.
        """
        return bisect_right(
            range(1, num_chunks + 1), limit_s, key=lambda num: self.expected_s(num) or 0.0
        )

    def _seconds(self, num_bytes: float) -> float | None:
        if self._num_observed < MIN_OBSERVATIONS:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        covariance = self._xy / self._weight - mean_x * mean_y
        slope = (
            max(0.0, covariance / variance)
            if variance > (mean_x * 1e-3) ** 2 and variance > 0
            else 0.0
        )
        if slope == 0.0 and mean_x > 0:
            # Reads of one size cannot tell latency from bandwidth: count all of it as bandwidth
            # beyond that size, as latency below.
            return mean_y * max(1.0, num_bytes / mean_x)
        return max(0.0, mean_y - slope * mean_x) + slope * num_bytes
