"""This machine, or this pod: shared memory, disk, memory and limits, against what settings want
of it.
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from lmcache_ctl.doctor.configuration import ENGINE, Loaded
from lmcache_ctl.doctor.findings import Finding, Level
from lmcache_ctl.output import size_text

GIB: Final = 1 << 30
JOURNAL_BYTES: Final = 64 << 20
"""Beside a sidecar's arena."""
MAX_SOCKET_PATH_BYTES: Final = 107
MIN_OPEN_FILES: Final = 16_384
IN_MEMORY: Final = frozenset({"tmpfs", "hugetlbfs", "ramfs"})
MOUNTS: Final = Path("/proc/self/mounts")
MEMORY_INFO: Final = Path("/proc/meminfo")
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def check_machine(loaded: Sequence[Loaded]) -> list[Finding]:
    """For each settings file, what its service needs of the machine that this runs on."""
    services = [one for one in loaded if one.file.kind != ENGINE]
    found = [
        one
        for file, settings in services
        for one in _of_one(f"{file.kind} {file.path}", file.kind, settings)
    ]
    return found + list(_limits(services)) if services else found


def _of_one(where: str, kind: str, settings: Any) -> Iterator[Finding]:
    if kind == "sidecar":
        yield from _arena(where, settings)
        yield from _socket(where, settings.socket_path)
    if kind == "storage":
        yield _memory(where, int(settings.memory_gb * GIB))
    if getattr(settings, "disk_path", None) is not None:
        yield _disk(where, settings.disk_path, int(settings.disk_gb * GIB))


def _arena(where: str, settings: Any) -> Iterator[Finding]:
    directory, wanted = settings.arena_path, int(settings.arena_gb * GIB)
    at, problem = _nearest(directory)
    if problem:
        fix = "give the sidecar and its engines one user or group, or another arena_path"
        yield Finding(
            Level.ERROR, "shared memory", where, f"arena_path {directory}: {problem}", fix
        )
        return
    kind = _file_system(at)
    if kind not in IN_MEMORY:
        fix = "mount an in-memory volume there (emptyDir with medium: Memory)"
        yield Finding(
            Level.WARNING,
            "shared memory",
            where,
            f"arena_path {directory} is on {kind}: every write of KV goes to a disk",
            fix,
        )
    free = _free_bytes(at) + _size_of(directory)
    if free < wanted + JOURNAL_BYTES:
        what = (
            f"arena_gb wants {size_text(wanted)} and 64 MiB for the journal; {at} has"
            f" {size_text(free)}"
        )
        fix = (
            "raise the volume's sizeLimit and the sidecar's memory limit (a container's own"
            " /dev/shm is 64 MiB), or lower arena_gb"
        )
        yield Finding(Level.ERROR, "shared memory", where, what, fix)
    else:
        yield Finding(
            Level.OK, "shared memory", where, f"{size_text(free)} for {size_text(wanted)}"
        )
    if at == directory and stat.S_IMODE(directory.stat().st_mode) & stat.S_IWOTH:
        what = (
            f"everybody may write to arena_path {directory}: whoever does, decides what engines"
            " load"
        )
        yield Finding(Level.ERROR, "shared memory", where, what, f"chmod o-w {directory}")


def _socket(where: str, path: Path) -> Iterator[Finding]:
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        what = (
            f"socket_path has {length} bytes, and a Unix socket's may have {MAX_SOCKET_PATH_BYTES}"
        )
        yield Finding(Level.ERROR, "socket", where, what, "choose a shorter one")
    elif problem := _nearest(path.parent)[1]:
        yield Finding(
            Level.ERROR,
            "socket",
            where,
            f"socket_path {path}: {problem}",
            "choose a directory that the sidecar may write to",
        )
    else:
        yield Finding(Level.OK, "socket", where, str(path))


def _disk(where: str, path: Path, wanted: int) -> Finding:
    at, problem = _nearest(path)
    if problem:
        return Finding(
            Level.ERROR,
            "disk",
            where,
            f"disk_path {path}: {problem}",
            "let the service's user write there (chown the volume)",
        )
    free = _free_bytes(at) + _size_of(path)
    if free < wanted:
        what = f"disk_gb wants {size_text(wanted)}; {at} has {size_text(free)}"
        return Finding(
            Level.WARNING,
            "disk",
            where,
            what,
            "enlarge the volume or lower disk_gb: what finds no room is not kept there",
        )
    return Finding(Level.OK, "disk", where, f"{size_text(free)} for {size_text(wanted)}")


def _memory(where: str, wanted: int) -> Finding:
    limit = _memory_bytes()
    if limit is not None and limit < wanted:
        what = (
            f"memory_gb wants {size_text(wanted)}; this machine, or its limit, has"
            f" {size_text(limit)}"
        )
        return Finding(
            Level.ERROR,
            "memory",
            where,
            what,
            "raise the container's memory limit or lower memory_gb",
        )
    return Finding(Level.OK, "memory", where, size_text(wanted))


def _limits(loaded: Sequence[Loaded]) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        what = (
            f"a process may open {soft} files (hard limit {hard}); a service holds up to 8192"
            " connections and its files"
        )
        yield Finding(
            Level.WARNING,
            "limits",
            "this machine",
            what,
            f"ulimit -n {MIN_OPEN_FILES}, or LimitNOFILE of its unit",
        )
    else:
        yield Finding(Level.OK, "limits", "this machine", f"{soft} open files")
    largest = max(
        (int(one.settings.arena_gb * GIB) for one in loaded if hasattr(one.settings, "arena_gb")),
        default=0,
    )
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest and file_size != resource.RLIM_INFINITY and file_size < largest:
        what = (
            f"a file may have {size_text(file_size)}, and the arena is one of {size_text(largest)}"
        )
        yield Finding(Level.ERROR, "limits", "this machine", what, "ulimit -f unlimited")


def _nearest(path: Path) -> tuple[Path, str]:
    """Return the path, or the nearest one above it that exists, and why the service cannot write
    there; "" if it can.
    """
    while True:
        try:
            is_directory = stat.S_ISDIR(path.stat().st_mode)
            break
        except (FileNotFoundError, NotADirectoryError) as exc:
            if path == path.parent:
                return path, f"{exc.strerror}"
            path = path.parent
        except (
            OSError,
            ValueError,
        ) as exc:  # a name that is too long, or no name at all; a directory that may not be entered
            return path, f"{getattr(exc, 'strerror', None) or exc}"
    if not is_directory:
        return path, f"{path} is no directory"
    return path, (
        "" if os.access(path, os.W_OK | os.X_OK) else f"user {os.getuid()} may not write to {path}"
    )


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _size_of(directory: Path) -> int:
    """What is there already is used again by the service that it belongs to; 0 for a directory
    that is not there.
    """
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(Path(folder) / name).st_blocks * 512
            except OSError:  # it went meanwhile
                continue
    return total


def _file_system(path: Path) -> str:
    """Of the mount that it is on."""
    best, kind = -1, "unknown"
    real = str(path.resolve())
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        _, at, found, *_ = line.split(" ")
        if (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= best:
            best, kind = len(at), found
    return kind


def _memory_bytes() -> int | None:
    """What this machine has, or its control group allows."""
    known = []
    try:
        known += [
            int(line.split()[1]) << 10
            for line in MEMORY_INFO.read_text().splitlines()
            if line.startswith("MemTotal:")
        ]
        text = CGROUP_LIMIT.read_text().strip()
        known += [int(text)] if text.isdigit() else []
    except OSError:
        pass
    return min(known, default=None)
