"""Pauses writes to a disk that refuses them, and detects that it has recovered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
SETTLED_S = 10.0
"""A disk is reported as recovered only after this long without a failed write: a full disk still
accepts an occasional write.
"""


class WriteBackoff:
    """After a failed write no write is tried for a while, twice as long after each consecutive
    failure. Thread-safe.

    Args:
        clock: Seconds, monotonic.
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
        """Return whether a write may be tried now. The first one after a pause is a probe; the
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
        """Record a failed write. Writes that began before the pause do not lengthen it.

        Returns:
            Whether to log it: once until `succeeded` has reported a recovery.
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
        """Record a successful write.

        Returns:
            Whether to log the recovery: a failure was logged, and none has occurred for
            `SETTLED_S`.
        """
        with self._lock:
            self._pause_s = 0.0
            is_news = self._has_told and self._clock() - self._failed_at >= SETTLED_S
            self._has_told = self._has_told and not is_news
            return is_news
