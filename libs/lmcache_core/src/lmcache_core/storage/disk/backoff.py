"""How a disk that refuses writes is left alone, and found healed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


class WriteBackoff:
    """After a failed write none is tried for a while, twice as long after each failure in a row. Thread-safe.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until = 0.0
        self._is_probing = False

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed."""
        return self._pause_s > 0

    def allows(self) -> bool:
        """Whether a write may be tried now. The first one after a pause is a probe: the others wait for another pause."""
        with self._lock:
            if self._pause_s == 0:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._pause_s
            self._is_probing = True
            return True

    def failed(self) -> None:
        """A write failed. Stragglers that began before the pause do not lengthen it."""
        with self._lock:
            if self._clock() < self._until and not self._is_probing:
                return
            self._is_probing = False
            self._pause_s = min(max(2 * self._pause_s, MIN_PAUSE_S), MAX_PAUSE_S)
            self._until = self._clock() + self._pause_s

    def succeeded(self) -> None:
        """A write succeeded."""
        with self._lock:
            self._pause_s = 0.0
