"""One process owns the directory of a disk tier."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from lmcache_core.errors import ConfigError


class DirectoryLock:
    """An advisory lock that the kernel drops when the process ends, however it ends.

    Args:
        path: The file to lock; made when missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Lock; nothing to do where this object holds the lock already.

        Raises:
            ConfigError: Another process holds it.
            OSError: The file can neither be made nor opened.
        """
        if self._fd is not None:
            return
        fd = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            owner = os.pread(fd, 32, 0).decode("ascii", errors="replace").strip()
            os.close(fd)
            raise ConfigError(
                f"disk path {self._path.parent} is in use by another process (pid {owner or 'unknown'}): "
                "give each process a directory of its own, or stop the other one"
            ) from exc
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        self._fd = fd

    def release(self) -> None:
        """Unlock. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | flags, 0o640)
        except OSError as exc:
            if exc.errno not in (errno.EROFS, errno.EACCES):
                raise
            return os.open(self._path, os.O_RDONLY | flags)
