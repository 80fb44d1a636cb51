"""Files of the simulated machines: real files under one directory, with the faults of real disks.

Memory of a machine (`shm`, `run`) has no faults and is lost with the machine's power. Its disk
keeps synced data; unsynced data may be lost, torn or kept, as the seed decides.
"""

from __future__ import annotations

import _pyio  # type: ignore[import-not-found]
import builtins
import contextlib
import errno
import io
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.kernel import EPOCH_S, Kernel, Machine, Process, Thread

SECTOR_BYTES = 512
OPERATION_S = (20e-6, 200e-6)
"""Shortest and longest time of an operation on a healthy disk."""
NAMES_LAST_S = 5.0
"""After this time a change of a directory is durable without a sync: the journal's interval."""
BYTES_LAST_S = 30.0
"""After this time bytes are durable without a sync: the writeback's interval."""
SHORT_CHANCE = 0.1
"""How often a write accepts only a part."""
CALLS = (
    "access", "chmod", "chown", "close", "copy_file_range", "dup", "fchmod", "fdatasync", "fstat",
    "fsync", "ftruncate", "link", "listdir", "lstat", "mkdir", "open", "posix_fadvise",
    "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "read", "readlink", "readv",
    "rename", "replace", "rmdir", "scandir", "sendfile", "stat", "statvfs", "symlink", "sync",
    "truncate", "unlink", "utime", "write", "writev",
)  # fmt: skip


def content(path: str) -> bytes:
    """Return the content of a file; takes no virtual time."""
    with _real_open(path, "rb") as file:
        return bytes(file.read())


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@dataclass
class _Unsynced:
    """A file that was written and not synced.

    Attributes:
        since_s: Time of the first unsynced write.
        before: Its content on the disk.
        is_lost: A sync has failed: the system considers its pages clean, and no later sync writes
            them.
    """

    since_s: float
    before: bytes
    is_lost: bool = False


@dataclass
class _NameChange:
    """A change in one or two directories that was not synced."""

    at_s: float
    folders: tuple[str, ...]
    paths: tuple[str, ...]
    undo: Callable[[], None]


class Disk:
    """The disk of a machine, and its faults.

    Attributes:
        root: Its directory.
        is_full: Nothing can be written.
        room_bytes: Space left for writes; None: unlimited.
        error_chance: How often an operation fails with `error`.
        slowness: Factor on the time of each operation.
        stall_chance: How often an operation takes `stall_s` longer.
        is_hanging: No operation ends.
    """

    def __init__(self, kernel: Kernel, root: Path, machine: Machine | None = None) -> None:
        self.root = root
        self.is_full = False
        self.room_bytes: int | None = None
        self.error_chance = 0.0
        self.error = errno.EIO
        self.slowness = 1.0
        self.stall_chance = 0.0
        self.stall_s = 5.0
        self.is_hanging = False
        self._kernel = kernel
        self._machine = machine
        self._hanging: list[Thread] = []
        self._unsynced: dict[int, _Unsynced] = {}
        self._changes: deque[_NameChange] = deque()
        self._bad_sectors: dict[int, set[int]] = {}
        self._num_left = 0
        self._crash: Callable[[], object] | None = None

    def heal(self) -> None:
        """End all faults; unreadable sectors stay so until their file is written."""
        self.is_full = self.is_hanging = False
        self.error_chance, self.slowness, self.stall_chance = 0.0, 1.0, 0.0
        self.room_bytes = None
        for thread in self._hanging:
            self._kernel.wake(thread)
        self._hanging.clear()

    def crash_in(self, num_operations: int, function: Callable[[], object]) -> None:
        """Call a function right after this many further operations have succeeded.

        Args:
            num_operations: At least 1.
            function: Called outside of any process, so that it may kill the process that uses the
                disk, or cut the power.
        """
        self._num_left, self._crash = num_operations, function

    def enter(self, writes: bool) -> None:
        """Spend the time of an operation, and raise its error if it fails."""
        kernel = self._kernel
        thread = kernel.current
        if thread is None:
            return
        while self.is_hanging:
            self._hanging.append(thread)
            kernel.block(None)
        least, largest = OPERATION_S
        kernel.sleep((least + (largest - least) * kernel.random.random()) * self.slowness)
        if self.stall_chance and kernel.random.random() < self.stall_chance:
            kernel.sleep(self.stall_s)
        if self.error_chance and kernel.random.random() < self.error_chance:
            raise _error(self.error)
        if writes and self.is_full:
            raise _error(errno.ENOSPC)

    def leave(self) -> None:
        """End an operation that has succeeded."""
        if self._crash is None or self._kernel.current is None:
            return
        self._num_left -= 1
        if self._num_left <= 0:
            function, self._crash = self._crash, None
            self._kernel.call_later(0.0, function)
            self._kernel.sleep(0.0)  # ends after the call, or never

    # --- What is synced --------------------------------------------------------------------------

    def created(self, fd: int) -> None:
        """Forget an earlier file with the same inode number."""
        number = _real.fstat(fd).st_ino
        self._unsynced.pop(number, None)
        self._bad_sectors.pop(number, None)

    def writes(self, fd: int) -> None:
        """Record the content on disk of a file that is about to change."""
        now_s = self._kernel.now
        status = _real.fstat(fd)
        known = self._unsynced.get(status.st_ino)
        self._bad_sectors.pop(status.st_ino, None)
        if known is not None and (known.is_lost or now_s - known.since_s < BYTES_LAST_S):
            return
        if len(self._unsynced) > 256:
            self._forget_written_back()
        self._unsynced[status.st_ino] = _Unsynced(now_s, _content(fd) if status.st_size else b"")

    def wrote(self, fd: int) -> None:
        """Set the virtual modification time of a changed file."""
        offset_s = 0.0 if self._machine is None else self._machine.wall_offset_s
        at_ns = int((EPOCH_S + self._kernel.now + offset_s) * 1e9)
        _real.utime(fd, ns=(at_ns, at_ns))

    def grant(self, data: bytes) -> bytes:
        """Return the part of `data` that one call writes.

        Raises:
            OSError: No room is left.
        """
        if len(data) > SECTOR_BYTES and self._kernel.random.random() < SHORT_CHANCE:
            data = data[: self._kernel.random.randint(1, len(data))]
        if self.room_bytes is not None and data:
            if self.room_bytes <= 0:
                raise _error(errno.ENOSPC)
            data = data[: self.room_bytes]
            self.room_bytes -= len(data)
        return data

    def synced(self, fd: int, path: str) -> None:
        """Record that a sync made a file's content, or the names in a directory, durable."""
        status = _real.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._changes = deque(self._lost({path}, lambda: False))
        elif (known := self._unsynced.get(status.st_ino)) is not None and not known.is_lost:
            del self._unsynced[status.st_ino]

    def sync_failed(self, fd: int) -> None:
        """Lose what a failed sync should have written."""
        known = self._unsynced.get(_real.fstat(fd).st_ino)
        if known is not None:
            known.is_lost = True

    def sync_all(self) -> None:
        """Make everything durable, as `sync` does."""
        self._unsynced = {one: known for one, known in self._unsynced.items() if known.is_lost}
        self._changes.clear()

    def named(self, paths: Sequence[str], undo: Callable[[], None]) -> None:
        """Record a change of names; several of one call become durable together or not at all."""
        now_s = self._kernel.now
        while self._changes and now_s - self._changes[0].at_s > NAMES_LAST_S:
            self._changes.popleft()
        folders = tuple(path.rpartition("/")[0] for path in paths)
        self._changes.append(_NameChange(now_s, folders, tuple(paths), undo))

    def spare(self, path: str) -> Callable[[], None]:
        """Return a function that restores a file after it was removed or replaced."""
        status = _status(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return lambda: None
        with _real_open(path, "rb") as file:
            content = file.read()
        unsynced = self._unsynced.get(status.st_ino)

        def restore() -> None:
            with _real_open(path, "wb") as file:
                file.write(content)
            _real.chmod(path, stat.S_IMODE(status.st_mode))
            _real.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
            if unsynced is not None:
                self._unsynced[_real.lstat(path).st_ino] = unsynced

        return restore

    def _lost(self, kept: set[str], is_kept: Callable[[], bool]) -> list[_NameChange]:
        """Return the changes to lose: the last ones of each directory.

        Args:
            kept: Directories whose changes are kept; updated.
            is_kept: Decides whether an optional change is kept.
        """
        lost = []
        for change in reversed(self._changes):
            if not kept.isdisjoint(change.folders) or is_kept():
                kept.update(change.folders)
            else:
                lost.append(change)
        return lost[::-1]

    def _forget_written_back(self) -> None:
        now_s = self._kernel.now
        self._unsynced = {
            one: known
            for one, known in self._unsynced.items()
            if known.is_lost or now_s - known.since_s < BYTES_LAST_S
        }

    # --- Faults that happen at once --------------------------------------------------------------

    def lose_power(self) -> None:
        """Lose some of what was not synced: the last changes of names, and parts of files."""
        random = self._kernel.random
        self._forget_written_back()
        now_s = self._kernel.now
        while self._changes and now_s - self._changes[0].at_s > NAMES_LAST_S:
            self._changes.popleft()
        chance = random.choice([0.0, 0.1, 0.5, 1.0])
        # Some file systems have one journal for all directories, others write them independently.
        is_ordered = random.random() < 0.5
        kept: set[str] = set()
        lost = self._lost(kept, lambda: (is_ordered and bool(kept)) or random.random() < chance)
        for change in reversed(lost):
            with contextlib.suppress(OSError):  # its directory is gone
                change.undo()
        if self._unsynced:
            paths = {_real.lstat(path).st_ino: path for path in _walk(str(self.root))}
            for number, unsynced in self._unsynced.items():
                if number in paths:
                    self._tear(paths[number], unsynced.before)
        self._unsynced.clear()
        self._changes.clear()
        self._crash = None

    def _tear(self, path: str, before: bytes) -> None:
        """Leave each sector with its synced content, or with what was written since."""
        random = self._kernel.random
        status = _real.lstat(path)
        with _real_open(path, "rb") as file:
            after = file.read()
        chance = random.choice([0.0, 0.5, 0.9, 1.0])
        sizes = sorted((len(before), len(after)))
        size = random.choice([*sizes, random.randint(*sizes)])
        data = bytearray(size)
        for at in range(0, size, SECTOR_BYTES):
            written = after if random.random() < chance else before
            end = min(at + SECTOR_BYTES, size, len(written))
            if at < end:
                data[at:end] = written[at:end]
        with _real_open(path, "r+b") as file:
            file.write(data)
            file.truncate(size)
        _real.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))

    def would_lose(self, path: str) -> bool:
        """Return whether a power cut now could lose or tear a file; takes no virtual time."""
        now_s = self._kernel.now
        known = self._unsynced.get(_real.lstat(path).st_ino)
        above = {path, *(str(folder) for folder in Path(path).parents)}
        return (
            known is not None and (known.is_lost or now_s - known.since_s < BYTES_LAST_S)
        ) or any(
            now_s - change.at_s <= NAMES_LAST_S and not above.isdisjoint(change.paths)
            for change in self._changes
        )

    def has(self, path: str) -> bool:
        """Return whether a file exists; takes no virtual time."""
        return _status(path) is not None

    def is_folder(self, path: str) -> bool:
        """Return whether a directory exists; takes no virtual time."""
        status = _status(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def used_bytes(self, folder: Path) -> int:
        """Return the size of the files in one of its directories; takes no virtual time."""
        if not self.is_folder(str(folder)):
            return 0
        return sum(int(_real.lstat(path).st_size) for path in _walk(str(folder)))

    def remove_oldest(self, folder: Path, most_bytes: int) -> None:
        """Remove the files of a directory that were written first until the rest is small enough;
        takes no virtual time.
        """
        files = [(_real.lstat(path), path) for path in _walk(str(folder))]
        left = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda one: (one[0].st_mtime_ns, one[1])):
            if left <= most_bytes:
                break
            if path.endswith(".kvr"):
                _real.unlink(path)
                left -= status.st_size

    def paths(self, folder: Path) -> Iterator[str]:
        """Yield the files in one of its directories, ordered by name; takes no virtual time."""
        return _walk(str(folder))

    def temporary_files(self, folder: Path) -> list[str]:
        """Return the files in a directory that are being written; takes no virtual time."""
        return [path for path in _walk(str(folder)) if path.endswith(".tmp")]

    def _some_sectors(self, num_sectors: int) -> Iterator[tuple[str, int, int]]:
        """Yield random sectors of random files: path, first byte, number of bytes."""
        random = self._kernel.random
        files = sorted(_walk(str(self.root)))
        for _ in range(num_sectors if files else 0):
            path = random.choice(files)
            size = _real.lstat(path).st_size
            if size:
                at = random.randrange(-(-size // SECTOR_BYTES)) * SECTOR_BYTES
                yield path, at, min(SECTOR_BYTES, size - at)

    def corrupt(self, num_sectors: int) -> int:
        """Silently change random sectors of random files; return how many."""
        random = self._kernel.random
        num_changed = 0
        for path, at, num_bytes in self._some_sectors(num_sectors):
            status = _real.lstat(path)
            with _real_open(path, "r+b") as file:
                file.seek(at)
                data = bytearray(file.read(num_bytes))
                kind = random.random()
                if kind < 0.6:
                    data[random.randrange(num_bytes)] ^= 1 << random.randrange(8)
                elif kind < 0.8:
                    data = bytearray(num_bytes)
                else:
                    data = bytearray(random.randbytes(num_bytes))
                file.seek(at)
                file.write(data)
            _real.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
            num_changed += 1
        return num_changed

    def break_sectors(self, num_sectors: int) -> int:
        """Make reads of random sectors fail with EIO until their files are written again."""
        num_broken = 0
        for path, at, _ in self._some_sectors(num_sectors):
            bad = self._bad_sectors.setdefault(_real.lstat(path).st_ino, set())
            bad.add(at // SECTOR_BYTES)
            num_broken += 1
        return num_broken

    def break_ends(self, folder: Path) -> None:
        """Make the last sector of each file in a directory unreadable until it is written again."""
        for path in _walk(str(folder)):
            status = _real.lstat(path)
            self._bad_sectors.setdefault(status.st_ino, set()).add(
                (status.st_size - 1) // SECTOR_BYTES
            )

    def mend_sectors(self) -> None:
        """Make all sectors readable."""
        self._bad_sectors.clear()

    def is_broken(self, path: str) -> bool:
        """Return whether a file has sectors that cannot be read."""
        return bool(self._bad_sectors.get(_real.lstat(path).st_ino))

    def reads(self, fd: int, at: int | None, num_bytes: int) -> None:
        """Raise an error if a sector cannot be read.

        Args:
            fd: Descriptor of the file.
            at: First byte; None: the descriptor's position.
            num_bytes: Number of bytes to read.
        """
        if self._bad_sectors:
            bad = self._bad_sectors.get(_real.fstat(fd).st_ino, ())
            begin = os.lseek(fd, 0, os.SEEK_CUR) if at is None else at
            if any(
                begin < (one + 1) * SECTOR_BYTES and one * SECTOR_BYTES < begin + num_bytes
                for one in bad
            ):
                raise _error(errno.EIO)


class Descriptor:
    """An open file of a simulated process."""

    def __init__(self, fd: int, path: str, disk: Disk | None) -> None:
        self.fd = fd
        self.path = path
        self.disk = disk
        _all_open[fd] = self

    def process_ended(self) -> None:
        """Close it."""
        _all_open.pop(self.fd, None)
        _real.close(self.fd)


class Files:
    """The directory of all machines' files.

    Args:
        kernel: The simulation.
        root: Created here, and removed by `close`.
    """

    def __init__(self, kernel: Kernel, root: Path) -> None:
        self.root = root
        self.disks: dict[str, Disk] = {}
        self.kernel = kernel
        _remove_tree(str(root))
        root.mkdir(parents=True)
        self._prefix = f"{root}/"

    def add_machine(self, machine: Machine) -> Path:
        """Create a machine's directories `disk`, `shm` and `run`; return their parent."""
        place = self.root / machine.name
        for name in ("disk", "shm", "run"):
            (place / name).mkdir(parents=True)
        self.disks[machine.name] = Disk(self.kernel, place / "disk", machine)
        return place

    def lose_power(self, machine: Machine) -> None:
        """Lose the machine's memory and unsynced data. All its processes are already dead."""
        for process in self.kernel.processes:
            assert process.is_dead or process.machine is not machine, f"{process.name} runs"
        for name in ("shm", "run"):
            place = str(self.root / machine.name / name)
            _remove_tree(place)
            _real.mkdir(place)
        self.disks[machine.name].lose_power()

    def has(self, path: str) -> bool:
        """Return whether a path belongs to a simulated machine."""
        return path.startswith(self._prefix)

    def disk_of(self, path: str) -> Disk | None:
        """Return the disk of a path; None for memory and for paths that are not simulated."""
        if not path.startswith(self._prefix):
            return None
        machine, _, below = path[len(self._prefix) :].partition("/")
        return self.disks.get(machine) if below.partition("/")[0] == "disk" else None

    def close(self) -> None:
        """Remove everything."""
        _remove_tree(str(self.root))


class _Real:
    """The calls of the real machine."""

    def __getattr__(self, name: str) -> Any:
        return _originals[name]


_originals = {name: getattr(os, name) for name in CALLS}
_real = _Real()
_real_open = io.open
_all_open: dict[int, Descriptor] = {}
kernel: Kernel
files: Files


def _status(path: str) -> os.stat_result | None:
    try:
        return _real.lstat(path)  # type: ignore[no-any-return]
    except (FileNotFoundError, NotADirectoryError):
        return None


def _content(fd: int) -> bytes:
    with _real_open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()


def _walk(folder: str) -> Iterator[str]:
    """Yield the files below, ordered by name; takes no virtual time."""
    with _real.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        else:
            yield entry.path


def _remove_tree(path: str) -> None:
    status = _status(path)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        _real.unlink(path)
        return
    for name in _real.listdir(path):
        _remove_tree(f"{path}/{name}")
    _real.rmdir(path)


def _path_of(target: Any, dir_fd: int | None = None) -> str:
    if not isinstance(target, str | bytes | os.PathLike):
        return ""
    name = os.fsdecode(target)
    if dir_fd is not None and not name.startswith("/"):
        folder = _opened(dir_fd)
        name = f"{folder.path}/{name}" if folder is not None else ""
    return os.path.normpath(name) if "/." in name or name.endswith("/") else name


def _opened(fd: int) -> Descriptor | None:
    process = kernel.process
    if process is None:
        return None
    found = process.descriptors.get(fd)
    if isinstance(found, Descriptor):
        return found
    if fd in _all_open:  # of another process: this one has closed its own descriptor of that number
        raise _error(errno.EBADF)
    return None


def _check_descriptors(process: Process) -> None:
    if len(process.descriptors) >= process.max_descriptors:
        raise _error(errno.EMFILE)


# --- Descriptors ---------------------------------------------------------------------------------


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    name = _path_of(path, dir_fd)
    process = kernel.process
    if process is None or not files.has(name):
        return int(_real.open(path, flags, mode, dir_fd=dir_fd))
    _check_descriptors(process)
    disk = files.disk_of(name)
    if disk is None:
        fd = int(_real.open(name, flags, mode))
        process.descriptors[fd] = Descriptor(fd, name, None)
        return fd
    disk.enter(bool(flags & os.O_CREAT) and _status(name) is None)
    creates = bool(flags & os.O_CREAT) and _status(name) is None
    fd = int(_real.open(name, flags & ~os.O_TRUNC, mode))
    process.descriptors[fd] = Descriptor(fd, name, disk)
    if creates:
        disk.created(fd)
        disk.named([name], lambda: _real.unlink(name))
    if creates or flags & os.O_TRUNC:
        disk.writes(fd)
        if flags & os.O_TRUNC:
            _real.ftruncate(fd, 0)
        disk.wrote(fd)
    disk.leave()
    return fd


def _close(fd: int) -> None:
    process = kernel.process
    if process is not None and fd in process.descriptors:
        found = process.descriptors[fd]
        if not isinstance(found, Descriptor):
            found.close()
            return
        del process.descriptors[fd]
        del _all_open[fd]
    else:
        _opened(fd)
    _real.close(fd)


def _dup(fd: int) -> int:
    opened = _opened(fd)
    if opened is None:
        return int(_real.dup(fd))
    process = kernel.process
    assert process is not None
    _check_descriptors(process)
    copy = int(_real.dup(fd))
    process.descriptors[copy] = Descriptor(copy, opened.path, opened.disk)
    return copy


def _on_descriptor(
    name: str, changes: bool = False, needs_room: bool = False
) -> Callable[..., Any]:
    """Return a call whose first argument is a descriptor."""
    original = _originals[name]

    def call(fd: int, *args: Any, **options: Any) -> Any:
        opened = _opened(fd)
        if opened is None or opened.disk is None:
            return original(fd, *args, **options)
        disk = opened.disk
        disk.enter(needs_room)
        if changes:
            disk.writes(fd)
        done = original(fd, *args, **options)
        if changes:
            disk.wrote(fd)
        disk.leave()
        return done

    return call


def _reading(name: str, has_place: bool) -> Callable[..., Any]:
    """Return a call that reads: a number of bytes, or into buffers."""
    original = _originals[name]

    def call(fd: int, what: Any, *args: Any) -> Any:
        opened = _opened(fd)
        if opened is None or opened.disk is None:
            return original(fd, what, *args)
        opened.disk.enter(False)
        num_bytes = what if isinstance(what, int) else sum(memoryview(one).nbytes for one in what)
        opened.disk.reads(fd, args[0] if has_place else None, num_bytes)
        done = original(fd, what, *args)
        opened.disk.leave()
        return done

    return call


def _writing(name: str, one_name: str, has_place: bool) -> Callable[..., Any]:
    """Return a call that writes a buffer, or buffers."""
    original = _originals[name]
    write = _originals[one_name]

    def call(fd: int, what: Any, *args: Any) -> int:
        opened = _opened(fd)
        if opened is None or opened.disk is None:
            return int(original(fd, what, *args))
        disk = opened.disk
        disk.enter(True)
        data = disk.grant(bytes(what) if name == one_name else b"".join(what))
        disk.writes(fd)
        count = int(write(fd, data, *args[: int(has_place)]))
        disk.wrote(fd)
        disk.leave()
        return count

    return call


def _syncing(name: str) -> Callable[[Any], None]:
    original = _originals[name]

    def call(file: Any) -> None:
        fd = file if isinstance(file, int) else file.fileno()
        opened = _opened(fd)
        if opened is None or opened.disk is None:
            original(fd)
            return
        try:
            opened.disk.enter(False)
        except OSError:
            opened.disk.sync_failed(fd)
            raise
        opened.disk.synced(fd, opened.path)
        opened.disk.leave()

    return call


def _sync() -> None:
    process = kernel.process
    disk = None if process is None else files.disks.get(process.machine.name)
    if disk is not None:
        disk.enter(False)
        disk.sync_all()


def _copy_file_range(
    src: int, dst: int, count: int, offset_src: int | None = None, offset_dst: int | None = None
) -> int:
    data = os.read(src, count) if offset_src is None else os.pread(src, count, offset_src)
    return os.write(dst, data) if offset_dst is None else os.pwrite(dst, data, offset_dst)


def _sendfile(out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
    if _opened(out_fd) is None:
        raise _error(errno.EINVAL)  # callers read and send instead
    return _copy_file_range(in_fd, out_fd, count, offset)


# --- Names ---------------------------------------------------------------------------------------


def _on_path(name: str) -> Callable[..., Any]:
    """Return a call whose first argument is a path, or a descriptor."""
    original = _originals[name]
    by_descriptor = _on_descriptor(name)

    def call(path: Any = ".", *args: Any, **options: Any) -> Any:
        if isinstance(path, int):
            return by_descriptor(path, *args, **options)
        disk = files.disk_of(_path_of(path, options.get("dir_fd")))
        if disk is None:
            return original(path, *args, **options)
        disk.enter(False)
        done = original(path, *args, **options)
        disk.leave()
        return done

    return call


class _Entries:
    """The result of `os.scandir`."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _listing(name: str) -> Callable[..., Any]:
    """Return a call that lists a directory, in an order decided by the seed."""
    original = _originals[name]

    def call(path: Any = ".") -> Any:
        opened = _opened(path) if isinstance(path, int) else None
        place = opened.path if opened is not None else _path_of(path)
        process = kernel.process
        if process is None or not files.has(place):
            return original(path)
        _check_descriptors(process)
        disk = files.disk_of(place)
        if disk is not None:
            disk.enter(False)
        found = list(original(path))
        found.sort(key=lambda one: one if isinstance(one, str | bytes) else one.name)
        kernel.random.shuffle(found)
        if disk is not None:
            disk.leave()
        return found if name == "listdir" else _Entries(found)

    return call


def _statvfs(path: Any) -> os.statvfs_result:
    opened = _opened(path) if isinstance(path, int) else None
    disk = opened.disk if opened is not None else files.disk_of(_path_of(path))
    if disk is None:
        return _real.statvfs(path)  # type: ignore[no-any-return]
    disk.enter(False)
    _real.statvfs(path)
    disk.leave()
    free = 0 if disk.is_full else 1 << 18
    if disk.room_bytes is not None:
        free = min(free, disk.room_bytes >> 12)
    return os.statvfs_result((4096, 4096, 1 << 20, free, free, 1 << 20, 1 << 19, 1 << 19, 0, 255))


def _mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    name = _path_of(path, dir_fd)
    disk = files.disk_of(name)
    if disk is None:
        _real.mkdir(path, mode, dir_fd=dir_fd)
        return
    disk.enter(_status(name) is None)
    _real.mkdir(name, mode)
    disk.named([name], lambda: _remove_tree(name))
    disk.leave()


def _rmdir(path: Any, *, dir_fd: int | None = None) -> None:
    name = _path_of(path, dir_fd)
    disk = files.disk_of(name)
    if disk is None:
        _real.rmdir(path, dir_fd=dir_fd)
        return
    disk.enter(False)
    status = _status(name)
    _real.rmdir(name)
    assert status is not None
    mode = stat.S_IMODE(status.st_mode)
    disk.named([name], lambda: _real.mkdir(name, mode))
    disk.leave()


def _truncate(path: Any, length: int) -> None:
    if isinstance(path, int):
        os.ftruncate(path, length)
        return
    if files.disk_of(_path_of(path)) is None:
        _real.truncate(path, length)
        return
    fd = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, length)
    finally:
        os.close(fd)


def _rename(
    src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    old, new = _path_of(src, src_dir_fd), _path_of(dst, dst_dir_fd)
    disk = files.disk_of(new)
    if disk is not files.disk_of(old):
        raise _error(errno.EXDEV)
    if disk is None:
        _real.replace(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        return
    disk.enter(False)
    restore = disk.spare(new)
    _real.replace(old, new)

    def undo() -> None:
        with contextlib.suppress(FileNotFoundError):
            _real.replace(new, old)
        restore()

    disk.named([old, new], undo)
    disk.leave()


def _unlink(path: Any, *, dir_fd: int | None = None) -> None:
    name = _path_of(path, dir_fd)
    disk = files.disk_of(name)
    if disk is None:
        _real.unlink(path, dir_fd=dir_fd)
        return
    disk.enter(False)
    status = _status(name)
    restore = disk.spare(name)
    _real.unlink(name)
    if disk.room_bytes is not None and status is not None and status.st_nlink == 1:
        disk.room_bytes += status.st_size
    disk.named([name], restore)
    disk.leave()


def _link(
    src: Any,
    dst: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
    follow_symlinks: bool = True,
) -> None:
    old, new = _path_of(src, src_dir_fd), _path_of(dst, dst_dir_fd)
    disk = files.disk_of(new)
    if disk is not files.disk_of(old):
        raise _error(errno.EXDEV)
    if disk is None:
        _real.link(
            src,
            dst,
            src_dir_fd=src_dir_fd,
            dst_dir_fd=dst_dir_fd,
            follow_symlinks=follow_symlinks,
        )
        return
    disk.enter(True)
    _real.link(old, new, follow_symlinks=follow_symlinks)
    disk.named([new], lambda: _real.unlink(new))
    disk.leave()


def _symlink(
    src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
) -> None:
    name = _path_of(dst, dir_fd)
    disk = files.disk_of(name)
    if disk is None:
        _real.symlink(src, dst, dir_fd=dir_fd)
        return
    disk.enter(True)
    _real.symlink(src, name)
    disk.named([name], lambda: _real.unlink(name))
    disk.leave()


# --- Files of the io module ----------------------------------------------------------------------


class _File(_pyio.FileIO):  # type: ignore[misc]
    """A file object that performs every operation through `os`, and dies with its process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._process = kernel.process
        super().__init__(*args, **options)

    def _has_died(self) -> bool:
        return self._process is not None and self._process.is_dead

    def write(self, b: Any) -> int:
        if self._has_died():
            return memoryview(b).nbytes
        return int(super().write(b))

    def close(self) -> None:
        if self._has_died():
            self._closefd = False  # its number may belong to another file by now
        super().close()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


def _open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    is_simulated = kernel.process is not None and (
        _opened(file) is not None if isinstance(file, int) else files.has(_path_of(file))
    )
    return (_pyio.open if is_simulated else _real_open)(file, mode, *args, **options)


def install(one: Files) -> None:
    """Replace the file operations of this process permanently."""
    global kernel, files
    kernel, files = one.kernel, one
    calls: dict[str, Any] = {
        "close": _close,
        "copy_file_range": _copy_file_range,
        "dup": _dup,
        "link": _link,
        "mkdir": _mkdir,
        "open": _open,
        "rename": _rename,
        "replace": _rename,
        "rmdir": _rmdir,
        "sendfile": _sendfile,
        "statvfs": _statvfs,
        "symlink": _symlink,
        "sync": _sync,
        "truncate": _truncate,
        "unlink": _unlink,
        "fdatasync": _syncing("fdatasync"),
        "fsync": _syncing("fsync"),
        "listdir": _listing("listdir"),
        "scandir": _listing("scandir"),
        "read": _reading("read", False),
        "readv": _reading("readv", False),
        "pread": _reading("pread", True),
        "preadv": _reading("preadv", True),
        "write": _writing("write", "write", False),
        "writev": _writing("writev", "write", False),
        "pwrite": _writing("pwrite", "pwrite", True),
        "pwritev": _writing("pwritev", "pwrite", True),
        "ftruncate": _on_descriptor("ftruncate", changes=True),
        "posix_fallocate": _on_descriptor("posix_fallocate", changes=True, needs_room=True),
        "posix_fadvise": _on_descriptor("posix_fadvise"),
        "fstat": _on_descriptor("fstat"),
        "fchmod": _on_descriptor("fchmod"),
    }
    for name in ("access", "chmod", "chown", "lstat", "readlink", "stat", "utime"):
        calls[name] = _on_path(name)
    assert calls.keys() == _originals.keys()
    for name, call in calls.items():
        setattr(os, name, call)
        for group in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if _originals[name] in group:
                group.add(call)
    os.remove = _unlink
    pyio: Any = _pyio
    pyio.FileIO = _File
    for name in ("BufferedReader", "BufferedWriter", "BufferedRandom", "TextIOWrapper"):
        setattr(pyio, name, getattr(io, name))
    io.open = builtins.open = _open_file
