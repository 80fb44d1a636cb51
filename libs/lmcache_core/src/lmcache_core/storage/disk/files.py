"""Every file operation of the disk tier. Tests inject a subclass that fails, or kills its process,
at a chosen operation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

FILE_MODE = 0o640
DIRECTORY_MODE = 0o750


class DiskFiles:
    """Blocking file operations; each may raise `OSError`. Stateless, thread-safe."""

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents, unless it exists."""
        path.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)

    def is_given(self, path: Path) -> bool:
        """Return whether a directory is a mount point, or in a directory that cannot be read: then
        no tier has made it.
        """
        return path.is_mount() or not os.access(path.parent, os.R_OK)

    def list_directory(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(entry.name for entry in path.iterdir())

    def stat(self, path: Path) -> os.stat_result:
        """Return the size and times of a file without following links."""
        return os.lstat(path)

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet, and return a descriptor for writing it."""
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE
        )

    def write(self, fd: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Append all buffers."""
        left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while left:
            written = os.writev(fd, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]

    def sync(self, fd: int) -> None:
        """Wait until the file's content is on the device."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing any file that has the new name."""
        source.replace(target)

    def sync_directory(self, path: Path) -> None:
        """Wait until the entries of a directory are on the device."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        """Remove a file, unless it is already gone."""
        path.unlink(missing_ok=True)

    def open(self, path: Path) -> int:
        """Return a descriptor for reading a file, without following links or blocking on a pipe."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def drop_cached(self, fd: int) -> None:
        """Drop a file from the page cache, as far as the system allows, so that the next read comes
        from its device or server.
        """
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, fd: int, buffer: bytearray | memoryview, at: int) -> int:
        """Fill a buffer from offset `at` and return the number of bytes read, fewer than the buffer
        holds if the file ends first.
        """
        left = memoryview(buffer).cast("B")
        begin = at
        while len(left):
            got = os.preadv(fd, [left], at)
            if got == 0:
                break
            at += got
            left = left[got:]
        return at - begin
