"""How many requests of one caller are served in a second."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_BUCKETS: Final = 4096


class RateLimiter:
    """One bucket for each caller, which holds one second's requests, at least one, and fills
    evenly.

    Beyond `MAX_BUCKETS` callers the one that has been away longest is forgotten, and has a full
    bucket if it comes again. For one thread.

    Args:
        per_second: Requests a second.
        clock: Monotonic time, seconds.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        assert per_second > 0
        self._per_second = per_second
        self._capacity = max(per_second, 1.0)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """Take one request of that caller's.

        Returns:
            0 when it may be served; else it was not taken, and one may be in that many seconds.
        """
        now = self._clock()
        level, at = self._buckets.pop(caller, (self._capacity, now))
        level = min(self._capacity, level + (now - at) * self._per_second)
        is_served = level >= 1.0
        self._buckets[caller] = (level - is_served, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if is_served else (1.0 - level) / self._per_second
