"""Ensures that one process owns the directory of a disk tier."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from lmcache_core.errors import ConfigError
from lmcache_core.forks import ProcessMark, enter_children


class DirectoryLock:
    """An advisory lock that the kernel releases when the process ends, in whatever way.

    Args:
        path: The file to lock; created if missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._process = ProcessMark()
        self._directory: os.stat_result | None = None

    def acquire(self) -> None:
        """Lock, unless this object already holds the lock.

        Raises:
            ConfigError: Another process holds it.
            OSError: The file can be neither created nor opened.
        """
        if self._fd is not None:
            return
        fd = self._open()
        try:
            self._directory = self._path.parent.stat()
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            owner = os.pread(fd, 32, 0).decode("ascii", errors="replace").strip()
            os.close(fd)
            raise ConfigError(
                f"disk path {self._path.parent} is in use by another process (pid"
                f" {owner or 'unknown'}): give each process a directory of its own, or stop the"
                " other one"
            ) from exc
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        self._fd, self._process = fd, ProcessMark()
        enter_children(self)

    def release(self) -> None:
        """Unlock, or, in a forked child, only close its copy. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        if self._process.is_here:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # effective even if a child still has the file open
        os.close(fd)

    def enter_child(self) -> None:
        """Close the child's copy, which would keep the lock when the parent has ended."""
        self.release()

    def is_volume_there(self) -> bool:
        """Distinguish a directory that was emptied or removed from one whose volume is gone.

        Returns:
            False if the locked directory is missing although it was not deleted: its files still
                exist, on a volume that may come back.
        """
        with contextlib.suppress(OSError):
            self._path.stat()
            return True
        # `rm -rf` on the content removes the lock file, too; on the directory, both.
        with contextlib.suppress(OSError):
            now = self._path.parent.stat()
            if self._directory is not None and os.path.samestat(now, self._directory):
                return True
        with contextlib.suppress(OSError):
            return self._fd is not None and os.fstat(self._fd).st_nlink == 0
        return False

    def _open(self) -> int:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | flags, 0o640)
        except OSError as exc:
            if exc.errno not in (errno.EROFS, errno.EACCES):
                raise
            return os.open(self._path, os.O_RDONLY | flags)
