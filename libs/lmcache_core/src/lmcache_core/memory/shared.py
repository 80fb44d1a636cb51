"""The shared-memory arena: a file that the sidecar owns and every serving process of the pod maps.

The sidecar allocates and touches the whole file before it listens (a sparse tmpfs write past the limit is SIGBUS inside the
serving engine, and pages are charged to whoever touches them first) and never truncates or resizes it. Every start is a new
generation in a new file: a client of an older one keeps writing to an inode that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.errors import CapacityError, ConfigError, UnavailableError

FILE_SUFFIX = ".arena"
_TOUCH_BYTES = 64 << 20


@dataclass(frozen=True)
class SharedArena:
    """A mapped arena file.

    Attributes:
        path: The file.
        size: Bytes.
        generation: Random name of the sidecar start that made it.
        load_view: Read-only bytes of the whole file.
        store_view: Writable bytes of the whole file.
    """

    path: Path
    size: int
    generation: int
    load_view: memoryview
    store_view: memoryview


def create_shared_arena(directory: Path, size: int, mode: int = 0o660) -> SharedArena:
    """Make, allocate, touch and map a new arena file; those that dead sidecars have left in the directory are unlinked.

    Args:
        directory: Shared volume of the pod; made when missing, for its owner and group.
        size: Bytes, rounded up to whole pages.
        mode: Permissions of the file, whatever the umask.

    Raises:
        ValueError: The size is not positive.
        CapacityError: The volume cannot hold that many bytes.
        ConfigError: The directory cannot be made or written to.
    """
    if size <= 0:
        raise ValueError(f"size={size}: an arena has at least one byte")
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    generation = secrets.randbits(62)
    path = directory / f"{generation:016x}{FILE_SUFFIX}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o770)
        _unlink_dead(directory)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as exc:
        raise ConfigError(f"arena_path={str(directory)!r}: {exc.strerror}; choose a directory that this user can write to") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # lasts as long as the mappings, which share the open file
        os.fchmod(fd, mode)
        os.posix_fallocate(fd, 0, size)
        arena = _map(fd, path, size, generation)
    except (OSError, OverflowError) as exc:
        path.unlink(missing_ok=True)
        reason = exc.strerror if isinstance(exc, OSError) else "File too large"
        gigabytes = size / (1 << 30)
        raise CapacityError(f"arena of {gigabytes:.2f} GB in {directory}: {reason}; enlarge the volume or lower arena_gb") from exc
    finally:
        os.close(fd)
    zeros = bytes(min(size, _TOUCH_BYTES))
    for at in range(0, size, _TOUCH_BYTES):
        arena.store_view[at : at + _TOUCH_BYTES] = zeros[: min(_TOUCH_BYTES, size - at)]
    return arena


def attach_shared_arena(path: Path, size: int, generation: int) -> SharedArena:
    """Map an arena file that a sidecar made, twice: read-only for loads, writable for stores.

    Raises:
        UnavailableError: The file is not there, or is shorter than the sidecar said.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError) as exc:
        raise UnavailableError(f"arena {path}: {exc}") from exc
    try:
        if not 0 < size <= os.fstat(fd).st_size:
            raise UnavailableError(f"arena {path} has {os.fstat(fd).st_size} bytes; the sidecar said {size}")
        return _map(fd, path, size, generation)
    except (OSError, ValueError) as exc:
        raise UnavailableError(f"arena {path} cannot be mapped: {exc}") from exc
    finally:
        os.close(fd)


def unlink_shared_arena(arena: SharedArena) -> None:
    """Remove the file's name; mappings stay valid until their processes end. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        arena.path.unlink()


def _unlink_dead(directory: Path) -> None:
    """A living sidecar's file is locked; the kernel ends the lock with its process, however it ends."""
    for path in directory.glob(f"*{FILE_SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        os.close(fd)


def _map(fd: int, path: Path, size: int, generation: int) -> SharedArena:
    load = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    store = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return SharedArena(path, size, generation, memoryview(load), memoryview(store))
