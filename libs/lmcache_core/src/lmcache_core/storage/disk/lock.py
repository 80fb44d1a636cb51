"""Ensures that one process owns the directory of a disk tier."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

from lmcache_core.errors import ConfigError
from lmcache_core.forks import ProcessMark, enter_children, unlock
from lmcache_core.storage.disk.files import DIRECTORY_MODE


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
        self._turn = threading.Lock()

    def acquire(self) -> None:
        """Lock, unless this object already holds the lock.

        Raises:
            ConfigError: Another process holds it.
            OSError: The file can be neither created nor opened.
        """
        if self._fd is None:
            self._lock()

    def release(self) -> None:
        """Unlock, or, in a forked child, only close its copy. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            unlock(fd, self._process)

    def is_held(self) -> bool:
        """Return whether this process still owns what lies at the path, so that it may write there
        and may take a file that is not found for gone.

        False if the locked file exists, but not here: its volume is unmounted or its directory was
        moved. If the locked file was deleted, with the content of the directory or alone, the lock
        is taken again, in a directory made again if need be; False if another process has it.
        Thread-safe.
        """
        with self._turn, contextlib.suppress(OSError, ConfigError):
            if self._fd is None:
                return False
            ours = os.fstat(self._fd)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(self._path.lstat(), ours):
                    return True
            # `rm -rf` on the content removes the lock file, too; on the directory, both. A file
            # deleted on a network file system may keep its link until it is closed.
            if ours.st_nlink and not self._is_our_directory():
                return False
            self._path.parent.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
            deleted = self._fd
            self._lock()
            os.close(deleted)
            return True
        return False

    def _is_our_directory(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            now = self._path.parent.stat()
            return self._directory is not None and os.path.samestat(now, self._directory)
        return False

    def _lock(self) -> None:
        fd = self._open()
        try:
            directory = self._path.parent.stat()
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
        self._fd, self._directory, self._process = fd, directory, ProcessMark()
        enter_children(self)

    def enter_child(self) -> None:
        """Close the child's copy, which would keep the lock when the parent has ended."""
        self._turn = threading.Lock()
        self.release()

    def _open(self) -> int:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | flags, 0o640)
        except OSError as exc:
            if exc.errno not in (errno.EROFS, errno.EACCES):
                raise
            try:
                return os.open(self._path, os.O_RDONLY | flags)
            except FileNotFoundError:
                raise exc from None  # there is no lock yet, and none may be made
