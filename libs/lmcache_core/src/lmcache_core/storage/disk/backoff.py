"""How a disk that refuses writes is left alone, and found healed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
SETTLED_S = 10.0
"""A disk counts as healed, for who is told of it, once no write has failed for so long: a full
one takes a write now and then.
"""


class WriteBackoff:
    """After a failed write none is tried for a while, twice as long after each failure in a row.
    Thread-safe.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until = 0.0
        self._is_probing = False
        self._has_told = False
        self._failed_at = 0.0

    @property
    def is_failing(self) -> bool:
        """Return whether the last write failed."""
        return self._pause_s > 0

    def allows(self) -> bool:
        """Return whether a write may be tried now. The first one after a pause is a probe: the
        others wait for another pause.
        """
        with self._lock:
            if self._pause_s == 0:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._pause_s
            self._is_probing = True
            return True

    def failed(self) -> bool:
        """Note that a write failed. Stragglers that began before the pause do not lengthen it.

        Returns:
            Whether that is worth telling: not again before `succeeded` was.
        """
        with self._lock:
            now = self._clock()
            is_news, self._has_told, self._failed_at = not self._has_told, True, now
            if now >= self._until or self._is_probing:
                self._is_probing = False
                self._pause_s = min(max(2 * self._pause_s, MIN_PAUSE_S), MAX_PAUSE_S)
                self._until = now + self._pause_s
            return is_news

    def succeeded(self) -> bool:
        """Note that a write succeeded.

        Returns:
            Whether that is worth telling: that writes fail was told, and none has for `SETTLED_S`.
        """
        with self._lock:
            self._pause_s = 0.0
            is_news = self._has_told and self._clock() - self._failed_at >= SETTLED_S
            self._has_told = self._has_told and not is_news
            return is_news
