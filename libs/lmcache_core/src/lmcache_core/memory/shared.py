"""The shared-memory arena: a file that the sidecar owns and every serving process of the pod maps.

The sidecar allocates and touches the whole file before it listens, and never truncates or resizes
it: a sparse tmpfs write past the limit is a SIGBUS inside the serving engine, and pages are charged
to the process that touches them first. Each start is a new generation, in the same file if it fits:
`arena_locks` tells when the clients of an earlier one are gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.errors import CapacityError, ConfigError, UnavailableError
from lmcache_core.memory.arena_locks import (
    FileLock,
    begin_generation,
    forget_generation,
    generation_path,
    generations_in,
    join_generation,
)
from lmcache_core.memory.populate import allocate, populate

FILE_NAME = "kv.arena"
DEFAULT_MODE = 0o660
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MOUNTS = Path("/proc/self/mountinfo")
_FOR_THE_MACHINE = re.compile(r"\[(deny|force)\]")
_OF_VOLUMES = re.compile(r"^\S+ \S+ (\d+:\d+) .* - .*\bhuge=(\w+)", re.MULTILINE)
ALLOWING_POLICIES = frozenset({"advise", "within_size", "always", "force"})
_BLOCK_BYTES = 512
_MAX_PAGE_BYTES = 1 << 30


@dataclass(frozen=True)
class SharedArena:
    """A mapped arena file.

    Attributes:
        size: Size in bytes.
        generation: Random id of the sidecar's start that it belongs to.
        load_view: Read-only bytes of the whole file.
        store_view: Writable bytes of the whole file.
        lock: The owner's is on the directory. A client's is on the generation, to be released when
            the client no longer touches the arena.
        inode: Number of the file on its volume.
        huge_pages: Whether the kernel was asked for transparent huge pages.
    """

    path: Path
    size: int
    generation: int
    load_view: memoryview
    store_view: memoryview
    lock: FileLock
    inode: int
    huge_pages: bool


@dataclass(frozen=True)
class ArenaFile:
    """Properties of an arena file.

    Attributes:
        directory: Shared volume of the pod.
        size: Size in bytes; rounded up to whole pages of the volume.
        mode: Permissions of the file, regardless of the umask.
        huge_pages: Ask for transparent huge pages; None: where `huge_page_policy` allows them.

    Raises:
        ValueError: The size is not positive.
    """

    directory: Path
    size: int
    mode: int = DEFAULT_MODE
    huge_pages: bool | None = False

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise ValueError(f"size={self.size}: must be at least 1")

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / FILE_NAME

    def num_bytes(self) -> int:
        """Return the size in whole pages: on hugetlbfs those of the volume.

        Raises:
            OSError: The volume does not report its page size.
        """
        page, block = mmap.PAGESIZE, os.statvfs(self.directory).f_bsize
        page = block if page < block <= _MAX_PAGE_BYTES and block % page == 0 else page
        return -(-self.size // page) * page

    def create(self, lock: FileLock) -> SharedArena:
        """Create, allocate, touch and map a new file, replacing an older one, whose clients then
        write to a file that is no longer read.

        Args:
            lock: The lock on the directory.

        Raises:
            CapacityError: The volume cannot hold that many bytes.
            ConfigError: The directory is not writable.
        """
        try:
            size = self.num_bytes()
            self.remove()
            fd = os.open(
                self.path,
                os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                self.mode,
            )
        except OSError as exc:
            raise self._refused(exc) from exc
        try:
            os.fchmod(fd, self.mode)
            os.ftruncate(fd, size)
            arena = self._map(fd, size, lock)
            if arena.huge_pages:
                _take_huge_pages(fd, arena.store_view)
            allocate(fd, size)  # fails before anything is written if there is no room
            populate(arena.store_view)
            return arena
        except (OSError, OverflowError, ValueError) as exc:
            self.remove()
            reason = exc.strerror if isinstance(exc, OSError) else "File too large"
            where = f"arena of {size / (1 << 30):.2f} GB in {self.directory}"
            raise CapacityError(f"{where}: {reason}; enlarge the volume or lower arena_gb") from exc
        finally:
            os.close(fd)

    def reopen(self, lock: FileLock) -> SharedArena | None:
        """Map the file that an earlier start has created, as a new generation. None if no file
        fits: then nothing has changed.

        Args:
            lock: The lock on the directory.

        Raises:
            CapacityError: It cannot be opened at the moment, which says nothing about its content.
        """
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            if is_none_of_ours(self.path, exc):
                return None
            raise cannot_be_opened(self.path, exc) from exc
        try:
            status = os.fstat(fd)
            size = self.num_bytes()
            is_ours = (
                stat.S_ISREG(status.st_mode)
                and status.st_uid == os.geteuid()
                and status.st_nlink == 1
            )
            if not is_ours or status.st_size != size or status.st_blocks * _BLOCK_BYTES < size:
                return None
            os.fchmod(fd, self.mode)
            return self._map(fd, size, lock)
        except (OverflowError, ValueError):
            return None
        except OSError as exc:
            raise cannot_be_opened(self.path, exc) from exc
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Remove the names of the file and of all generations; mappings stay valid until their
        processes end. Idempotent.
        """
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        for generation in generations_in(self.directory):
            forget_generation(self.directory, generation)

    def _map(self, fd: int, size: int, lock: FileLock) -> SharedArena:
        generation = secrets.randbits(62)
        begin_generation(self.directory, generation, self.mode)
        huge_pages = self.huge_pages
        if huge_pages is None:
            huge_pages = huge_page_policy(self.directory) in ALLOWING_POLICIES
        try:
            return _map(fd, self.path, size, generation, lock, huge_pages)
        except (OSError, OverflowError, ValueError):
            forget_generation(self.directory, generation)
            raise

    def _refused(self, exc: OSError) -> ConfigError:
        return ConfigError(
            f"arena_path={str(self.directory)!r}: {exc.strerror}; choose a directory that this user"
            " can write to"
        )


def is_none_of_ours(path: Path, exc: OSError) -> bool:
    """Return whether opening failed because there is no file of this user, not for a reason that
    may be temporary.
    """
    if isinstance(exc, FileNotFoundError):
        return True
    try:
        status = path.lstat()
    except OSError:
        return False
    return not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid()


def cannot_be_opened(path: Path, exc: OSError) -> CapacityError:
    """Return the error for a file of an earlier start that exists but cannot be used at the
    moment.
    """
    return CapacityError(
        f"{path}: {exc.strerror}; what is in it is kept: let this user open it, or remove it to"
        " start without"
    )


def huge_page_policy(directory: Path) -> str:
    """Return the kernel's policy for huge pages of files in a directory: the volume's `never`,
    `advise` (if asked for), `within_size` or `always`, unless the machine has `deny` or `force`.

    The machine's other policies are for memory that is on no volume.
    """
    try:
        machine = _FOR_THE_MACHINE.search(SHMEM_ENABLED.read_text())
        if machine is not None:
            return machine[1]
        device = directory.stat().st_dev
        volume = f"{os.major(device)}:{os.minor(device)}"
        policies: dict[str, str] = dict(_OF_VOLUMES.findall(MOUNTS.read_text()))
    except OSError:  # a kernel or sandbox without them
        return "never"
    return policies.get(volume, "never")


def attach_shared_arena(path: Path, size: int, generation: int) -> SharedArena:
    """Join the generation of an arena file that a sidecar owns and map it twice: read-only for
    loads, writable for stores.

    Raises:
        UnavailableError: The file is missing or shorter than the sidecar stated, or the generation
            has ended.
    """
    with contextlib.ExitStack() as undo:
        lock = join_generation(path.parent, generation)
        undo.callback(lock.release)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as exc:
            raise UnavailableError(f"arena {path}: {exc}") from exc
        try:
            if not 0 < size <= os.fstat(fd).st_size:
                raise UnavailableError(
                    f"arena {path} has {os.fstat(fd).st_size} bytes; the sidecar said {size}"
                )
            arena = _map(fd, path, size, generation, lock, huge_pages=False)
        except (OSError, ValueError) as exc:
            raise UnavailableError(f"arena {path} cannot be mapped: {exc}") from exc
        finally:
            os.close(fd)
        undo.pop_all()
    return arena


def unlink_shared_arena(arena: SharedArena) -> None:
    """Remove the names of file and generation; mappings stay valid until their processes end.
    Idempotent.
    """
    for path in (arena.path, generation_path(arena.path.parent, arena.generation)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _take_huge_pages(fd: int, view: memoryview) -> None:
    """Fill a new file with huge pages, as far as there are any: once it has small pages it keeps
    them.
    """
    volume = os.fstatvfs(fd)
    if volume.f_bavail * volume.f_frsize >= len(view):
        with contextlib.suppress(OSError):
            populate(view)


def _map(
    fd: int, path: Path, size: int, generation: int, lock: FileLock, huge_pages: bool
) -> SharedArena:
    load = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    store = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if huge_pages:
        for mapping in (load, store):
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
    return SharedArena(
        path=path,
        size=size,
        generation=generation,
        load_view=memoryview(load),
        store_view=memoryview(store),
        lock=lock,
        inode=os.fstat(fd).st_ino,
        huge_pages=huge_pages,
    )
