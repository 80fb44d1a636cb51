"""The shared-memory arena: a file that the sidecar owns and every serving process of the pod maps.

The sidecar allocates and touches the whole file before it listens (a sparse tmpfs write past the limit is SIGBUS inside the
serving engine, and pages are charged to whoever touches them first) and never truncates or resizes it. Every start is a new
generation in a new file: a client of an older one keeps writing to an inode that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.errors import CapacityError, UnavailableError

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
    """Make, allocate, touch and map a new arena file; files of earlier generations in the directory are unlinked.

    Args:
        directory: Shared volume of the pod; made when missing.
        size: Bytes, rounded up to whole pages.
        mode: Permissions of the file.

    Raises:
        ValueError: The size is not positive.
        CapacityError: The volume cannot hold that many bytes.
    """
    if size <= 0:
        raise ValueError(f"size={size}: an arena has at least one byte")
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob(f"*{FILE_SUFFIX}"):
        old.unlink(missing_ok=True)
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    generation = secrets.randbits(62)
    path = directory / f"{generation:016x}{FILE_SUFFIX}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.posix_fallocate(fd, 0, size)
        arena = _map(fd, path, size, generation)
    except OSError as exc:
        path.unlink(missing_ok=True)
        gigabytes = size / (1 << 30)
        raise CapacityError(f"arena of {gigabytes:.2f} GB in {directory}: {exc.strerror}; enlarge the volume or lower arena_gb") from exc
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
    """Remove the file's name; mappings stay valid until their processes end."""
    with contextlib.suppress(FileNotFoundError):
        arena.path.unlink()


def _map(fd: int, path: Path, size: int, generation: int) -> SharedArena:
    load = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    store = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return SharedArena(path, size, generation, memoryview(load), memoryview(store))
