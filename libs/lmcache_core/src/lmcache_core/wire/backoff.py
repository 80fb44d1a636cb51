"""Decides when to retry a lost server."""

from __future__ import annotations

import random
from collections.abc import Callable

_MAX_EXPONENT = 32


class Backoff:
    """Bounded exponential back-off with jitter: the n-th consecutive failure forbids attempts for
    `initial_s * 2^n * (0.5 … 1)`.

    Args:
        clock: Seconds, monotonic.
        jitter: Random numbers in 0 … 1, the system's by default.
    """

    def __init__(
        self,
        initial_s: float,
        cap_s: float,
        clock: Callable[[], float],
        jitter: Callable[[], float] | None = None,
    ) -> None:
        self._initial_s = initial_s
        self._cap_s = cap_s
        self._clock = clock
        self._jitter = jitter or random.SystemRandom().random
        self._num_failures = 0
        self._not_before = float("-inf")

    @property
    def wait_s(self) -> float:
        """Seconds until the next attempt is allowed; 0 if it is allowed now."""
        return max(0.0, self._not_before - self._clock())

    def failed(self) -> None:
        """Record a failed attempt."""
        longest = min(self._cap_s, self._initial_s * 2 ** min(self._num_failures, _MAX_EXPONENT))
        self._num_failures += 1
        self._not_before = self._clock() + longest * (0.5 + self._jitter() / 2)

    def succeeded(self) -> None:
        """Record a successful attempt: the next wait is the first one again."""
        self._num_failures = 0
        self._not_before = float("-inf")
