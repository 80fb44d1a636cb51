"""Files that are replaced at run time: certificates, tokens, keys."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Generic, TypeVar

from lmcache_core.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 1.0

T = TypeVar("T")

Identity = tuple[int, ...]


class WatchedFiles:
    """Detects whether files have changed. Safe to share between threads.

    Args:
        paths: The files; links are followed, since a mounted secret is replaced by moving one.
        interval_s: Pause between two checks.
        clock: Seconds, monotonic.
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
        """Return whether a file has changed or disappeared since the last call, or since the
        start.
        """
        with self._lock:
            now = self._clock()
            if now < self._next_look:
                return False
            self._next_look = now + self._interval_s
            before, self._seen = self._seen, self._look()
            return before != self._seen

    def look_again(self) -> None:
        """Count the files as changed at the next check."""
        with self._lock:
            self._seen = ()

    def _look(self) -> tuple[Identity | None, ...]:
        return tuple(_identity_of(path) for path in self._paths)


def _identity_of(path: Path) -> Identity | None:
    """Return values that distinguish this file from a later one with its path; None if there is
    none.
    """
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def read_bounded(path: Path, where: str, max_bytes: int, if_larger: str) -> bytes:
    """Read a small file.

    Args:
        where: Name of the file in errors.
        if_larger: Advice for a larger file.

    Raises:
        ConfigError: It cannot be read or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as exc:
        raise ConfigError(
            f"{where} cannot be read: {exc.strerror or exc}; create it or correct the path"
        ) from exc
    if len(data) > max_bytes:
        raise ConfigError(f"{where} is larger than {max_bytes} bytes; {if_larger}")
    return data


class Reloaded(Generic[T]):
    """A value read from files, and re-read when they change. While they cannot be read, or are
    invalid, the last valid value stays in force, and each reason is logged once.

    Args:
        read: Reads the value; raises `ConfigError`.
        what: Name of the value in logs.
        interval_s: Shortest pause between two checks of the files.

    Raises:
        ConfigError: The first read fails.
    """

    def __init__(
        self,
        read: Callable[[], T],
        paths: Iterable[Path],
        what: str,
        interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        self._read = read
        self._what = what
        # Before reading: a change in between is read again.
        self._watch = WatchedFiles(paths, interval_s)
        self._value = read()
        self._problem = ""

    def current(self) -> T:
        """Return the current value; checks the files from time to time."""
        if self._watch.have_changed():
            try:
                self._value = self._read()
            except ConfigError as exc:
                self._watch.look_again()  # the file may be good, and descriptors lacking
                if str(exc) != self._problem:
                    logger.warning(
                        "files not usable, keeping what was read before: files=%s error=%s",
                        self._what,
                        exc,
                    )
                self._problem = str(exc)
            else:
                self._problem = ""
                logger.info("files reread: files=%s", self._what)
        return self._value
