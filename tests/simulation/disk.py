"""Files of the simulated machines: real ones under one directory, with the faults of real disks.

Memory of a machine (`shm`, `run`) has no faults and is gone when the machine loses its power. Its
disk keeps what was synced; what was not may be lost, torn or there, as the seed decides.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.simulation.kernel import Kernel, Machine, Process, Thread

SECTOR_BYTES = 512
OPERATION_S = (20e-6, 200e-6)
"""Least and largest time of an operation on a disk that is well."""
CALLS = (
    "chmod", "close", "fchmod", "fdatasync", "fstat", "fsync", "ftruncate", "listdir", "lstat",
    "mkdir", "open", "pread", "preadv", "pwrite", "rename", "replace", "rmdir", "scandir", "stat",
    "statvfs", "unlink", "write", "writev",
)  # fmt: skip


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Disk:
    """The disk of a machine, and what is wrong with it.

    Attributes:
        root: Its directory.
        is_full: Nothing can be written.
        error_chance: How often an operation fails with `error`.
        slowness: Factor on the time of each operation.
        is_hanging: No operation ends.
    """

    def __init__(self, kernel: Kernel, root: Path) -> None:
        self.root = root
        self.is_full = False
        self.error_chance = 0.0
        self.error = errno.EIO
        self.slowness = 1.0
        self.is_hanging = False
        self._kernel = kernel
        self._hanging: list[Thread] = []
        self._unsynced_files: dict[int, str] = {}
        self._unsynced_names: list[tuple[str, Callable[[], None]]] = []

    def heal(self) -> None:
        """End all faults."""
        self.is_full = self.is_hanging = False
        self.error_chance, self.slowness = 0.0, 1.0
        for thread in self._hanging:
            self._kernel.wake(thread)
        self._hanging.clear()

    def enter(self, writes: bool) -> None:
        """Take the time of an operation, and fail if it fails."""
        kernel = self._kernel
        thread = kernel.current
        if thread is None:
            return
        while self.is_hanging:
            self._hanging.append(thread)
            kernel.block(None)
        least, largest = OPERATION_S
        kernel.sleep((least + (largest - least) * kernel.random.random()) * self.slowness)
        if self.error_chance and kernel.random.random() < self.error_chance:
            raise _error(self.error)
        if writes and self.is_full:
            raise _error(errno.ENOSPC)

    def wrote(self, fd: int, path: str) -> None:
        """Remember that a file's content is not synced."""
        self._unsynced_files[_real.fstat(fd).st_ino] = path

    def synced(self, fd: int, path: str) -> None:
        """Forget what a sync makes safe: a file's content, or the names in a directory."""
        self._unsynced_files.pop(_real.fstat(fd).st_ino, None)
        if os.path.isdir(path):
            self._unsynced_names = [one for one in self._unsynced_names if one[0] != path]

    def named(self, path: str, undo: Callable[[], None]) -> None:
        """Remember a change of a directory that is not synced."""
        self._unsynced_names.append((os.path.dirname(path), undo))

    def lose_power(self) -> None:
        """Lose some of what was not synced: the last changes of names, and parts of files."""
        random = self._kernel.random
        kept = random.randint(0, len(self._unsynced_names))
        for _, undo in reversed(self._unsynced_names[kept:]):
            undo()
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                if _real.lstat(path).st_ino in self._unsynced_files:
                    self._tear(path)
        self._unsynced_files.clear()
        self._unsynced_names.clear()

    def _tear(self, path: str) -> None:
        random = self._kernel.random
        size = _real.lstat(path).st_size
        with _real_open(path, "r+b") as file:
            if random.random() < 0.3:
                file.truncate(random.randint(0, size))
                return
            for at in range(0, size, SECTOR_BYTES):
                if random.random() < 0.5:
                    file.seek(at)
                    file.write(bytes(min(SECTOR_BYTES, size - at)))

    def corrupt(self, num_sectors: int) -> int:
        """Turn bits of random sectors of random files; the number of sectors changed."""
        random = self._kernel.random
        files = sorted(
            os.path.join(folder, name) for folder, _, names in os.walk(self.root) for name in names
        )
        for _ in range(num_sectors if files else 0):
            path = random.choice(files)
            size = _real.lstat(path).st_size
            if size:
                with _real_open(path, "r+b") as file:
                    at = random.randrange(size)
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ (1 << random.randrange(8))]))
        return num_sectors if files else 0


class Descriptor:
    """An open file of a simulated process."""

    def __init__(self, fd: int, path: str, disk: Disk | None) -> None:
        self.fd = fd
        self.path = path
        self.disk = disk

    def process_ended(self) -> None:
        """Close it."""
        _real.close(self.fd)


class Files:
    """The directory that holds all machines' files.

    Args:
        kernel: The simulation.
        root: Made, and removed by `close`.
    """

    def __init__(self, kernel: Kernel, root: Path) -> None:
        self.root = root
        self.disks: dict[str, Disk] = {}
        self._kernel = kernel
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)

    def add_machine(self, machine: Machine) -> Path:
        """Make a machine's directories `disk`, `shm` and `run`; return where they are."""
        place = self.root / machine.name
        for name in ("disk", "shm", "run"):
            (place / name).mkdir(parents=True)
        self.disks[machine.name] = Disk(self._kernel, place / "disk")
        return place

    def lose_power(self, machine: Machine) -> None:
        """Forget the machine's memory, and what its disk has not synced."""
        for name in ("shm", "run"):
            shutil.rmtree(self.root / machine.name / name)
            (self.root / machine.name / name).mkdir()
        self.disks[machine.name].lose_power()

    def disk_of(self, path: str) -> Disk | None:
        """Return the disk that a path is on; None for memory and for what is not simulated."""
        for disk in self.disks.values():
            if path.startswith(str(disk.root)):
                return disk
        return None

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


class _Real:
    """The calls of the machine below."""

    def __getattr__(self, name: str) -> Any:
        return _originals[name]


_originals = {name: getattr(os, name) for name in CALLS}
_real = _Real()
_real_open = io.open
kernel: Kernel
files: Files


def _path_of(target: Any) -> str:
    return os.fsdecode(target) if isinstance(target, str | bytes | os.PathLike) else ""


def _opened(fd: int) -> Descriptor | None:
    process = kernel.process
    found = None if process is None else process.descriptors.get(fd)
    return found if isinstance(found, Descriptor) else None


def _room(process: Process) -> None:
    if len(process.descriptors) >= process.max_descriptors:
        raise _error(errno.EMFILE)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    name = _path_of(path)
    process = kernel.process
    if process is None or not name.startswith(str(files.root)):
        return int(_real.open(path, flags, mode, dir_fd=dir_fd))
    _room(process)
    disk = files.disk_of(name)
    creates = bool(flags & os.O_CREAT) and not os.path.lexists(name)
    if disk is not None:
        disk.enter(creates)
    fd = int(_real.open(path, flags, mode, dir_fd=dir_fd))
    process.descriptors[fd] = Descriptor(fd, name, disk)
    if creates and disk is not None:
        disk.named(name, lambda: _gone(name))
        disk.wrote(fd, name)
    return fd


def _gone(path: str) -> None:
    if os.path.lexists(path):
        _real.unlink(path)


def _close(fd: int) -> None:
    process = kernel.process
    if process is not None and fd in process.descriptors:
        found = process.descriptors.pop(fd)
        if not isinstance(found, Descriptor):
            found.close()
            return
    _real.close(fd)


def _on_descriptor(name: str, writes: bool) -> Callable[..., Any]:
    def call(fd: int, *args: Any) -> Any:
        opened = _opened(fd)
        if opened is None or opened.disk is None:
            return _originals[name](fd, *args)
        opened.disk.enter(writes)
        done = _originals[name](fd, *args)
        if writes:
            opened.disk.wrote(fd, opened.path)
        elif name in ("fsync", "fdatasync"):
            opened.disk.synced(fd, opened.path)
        return done

    return call


def _on_path(name: str, writes: bool) -> Callable[..., Any]:
    def call(path: Any = ".", *args: Any, **options: Any) -> Any:
        if isinstance(path, int):
            return _on_descriptor(name, writes)(path, *args)
        disk = files.disk_of(_path_of(path))
        if disk is not None:
            disk.enter(writes)
        return _originals[name](path, *args, **options)

    return call


def _writev(fd: int, buffers: Sequence[Any]) -> int:
    opened = _opened(fd)
    if opened is None or opened.disk is None:
        return int(_real.writev(fd, buffers))
    opened.disk.enter(True)
    data = b"".join(buffers)
    if len(data) > 1 and kernel.random.random() < 0.1:
        data = data[: kernel.random.randint(1, len(data))]  # as where a signal comes in between
    opened.disk.wrote(fd, opened.path)
    return int(_real.write(fd, data))


def _rename(source: Any, target: Any, **options: Any) -> None:
    old, new = _path_of(source), _path_of(target)
    disk = files.disk_of(new)
    if disk is None:
        _real.replace(source, target, **options)
        return
    disk.enter(False)
    spare = None
    if os.path.lexists(new) and not os.path.isdir(new):
        with _real_open(new, "rb") as file:
            spare = file.read()
    _real.replace(source, target, **options)

    def undo() -> None:
        if os.path.lexists(new):
            _real.replace(new, old)
        if spare is not None:
            with _real_open(new, "wb") as file:
                file.write(spare)

    disk.named(new, undo)


def _unlink(path: Any, **options: Any) -> None:
    name = _path_of(path)
    disk = files.disk_of(name)
    if disk is None:
        _real.unlink(path, **options)
        return
    disk.enter(False)
    spare = None
    if os.path.isfile(name):
        with _real_open(name, "rb") as file:
            spare = file.read()
    _real.unlink(path, **options)

    def undo() -> None:
        if spare is not None and os.path.isdir(os.path.dirname(name)):
            with _real_open(name, "wb") as file:
                file.write(spare)

    disk.named(name, undo)


def _open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    name = _path_of(file)
    disk = files.disk_of(name) if name and kernel.process is not None else None
    if disk is not None:
        disk.enter(set(mode) & set("wax+") != set())
    return _real_open(file, mode, *args, **options)


def install(one: Files) -> None:
    """Replace the file operations of this process, for good."""
    global kernel, files
    kernel, files = one._kernel, one
    os_: Any = os
    os_.open, os_.close, os_.writev = _open, _close, _writev
    os_.rename = os_.replace = _rename
    os_.unlink = os_.remove = _unlink
    for name in ("write", "pwrite", "ftruncate"):
        setattr(os, name, _on_descriptor(name, True))
    for name in ("fstat", "fsync", "fdatasync", "fchmod", "pread", "preadv"):
        setattr(os, name, _on_descriptor(name, False))
    for name in ("stat", "lstat", "listdir", "scandir", "statvfs", "chmod", "rmdir"):
        setattr(os, name, _on_path(name, False))
    os.mkdir = _on_path("mkdir", True)
    io.open = builtins.open = _open_file  # type: ignore[assignment]
