"""Files that others replace while we run: certificates, tokens, keys."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

LOOK_INTERVAL_S: Final = 1.0

Identity = tuple[int, ...]


class WatchedFiles:
    """Tells whether files are others than they were. Safe to share between threads.

    Args:
        paths: The files; links are followed, since a mounted secret is replaced by moving one.
        interval_s: Pause between two looks.
        clock: Monotonic time, seconds.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        interval_s: float = LOOK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = tuple(paths)
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._look()
        self._next_look = clock() + interval_s

    def have_changed(self) -> bool:
        """Whether something is different since this was last asked, or since the beginning. A
        file that has gone is different.
        """
        with self._lock:
            now = self._clock()
            if now < self._next_look:
                return False
            self._next_look = now + self._interval_s
            before, self._seen = self._seen, self._look()
            return before != self._seen

    def _look(self) -> tuple[Identity | None, ...]:
        return tuple(identity_of(path) for path in self._paths)


def identity_of(path: Path) -> Identity | None:
    """What tells this file from one that takes its place; None where there is none."""
    try:
        return identify(path.stat())
    except OSError:
        return None


def identify(stat: os.stat_result) -> Identity:
    """The same for a file that is open."""
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
