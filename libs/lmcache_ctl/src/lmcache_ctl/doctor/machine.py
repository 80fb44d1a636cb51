"""Check this machine, or pod: shared memory, disk, memory and limits that settings ask for."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from lmcache_ctl.doctor.configuration import ENGINE, Loaded
from lmcache_ctl.doctor.findings import Finding, Subject
from lmcache_ctl.output import size_text

GIB: Final = 1 << 30
JOURNAL_BYTES: Final = 64 << 20
"""In addition to a sidecar's arena."""
MIN_OPEN_FILES: Final = 16_384
IN_MEMORY: Final = frozenset({"tmpfs", "hugetlbfs", "ramfs"})
MOUNTS: Final = Path("/proc/self/mounts")
MEMORY_INFO: Final = Path("/proc/meminfo")
KERNEL_ROOTS: Final = ("/proc", "/sys")
RDMA_DEVICES: Final = Path("/sys/class/infiniband")
STATUS: Final = Path("/proc/self/status")
CAP_IPC_LOCK: Final = 14
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def check_machine(loaded: Sequence[Loaded]) -> list[Finding]:
    """Check that this machine has what the service of each settings file needs."""
    services = [one for one in loaded if one.file.kind != ENGINE]
    found: list[Finding] = []
    settings: Any  # each kind has its own model, which mypy cannot see
    for file, settings in services:
        where = f"{file.kind} {file.path}"
        if file.kind == "sidecar":
            found += _arena(Subject("shared memory", where), settings)
            found.append(_socket(Subject("socket", where), settings.socket_path))
            fix = "remove it, or set socket_path and arena_path to a directory of your own"
            for problem in settings.directory_problems():
                found.append(Subject("socket", where).error(problem, fix))
            if settings.mover_socket is not None:
                found += _mover(Subject("mover", where), int(settings.arena_gb * GIB))
        found += _addresses(Subject("addresses", where), settings)
        if file.kind == "storage":
            found.append(_memory(Subject("memory", where), int(settings.memory_gb * GIB)))
        if getattr(settings, "disk_path", None) is not None:
            wanted = int(settings.disk_gb * GIB)
            found.append(_disk(Subject("disk", where), settings.disk_path, wanted))
    return found + list(_limits(services)) if services else found


def _arena(subject: Subject, settings: Any) -> Iterator[Finding]:
    directory, wanted = settings.arena_path, int(settings.arena_gb * GIB)
    at, problem = _nearest(directory)
    if problem:
        fix = "give the sidecar and its engines one user or group, or another arena_path"
        yield subject.error(f"arena_path {directory}: {problem}", fix)
        return
    kind = _file_system(at)
    if kind not in IN_MEMORY:
        what = f"arena_path {directory} is on {kind}: every write of KV goes to a disk"
        fix = "mount an in-memory volume there (emptyDir with medium: Memory)"
        yield subject.warning(what, fix)
    free = shutil.disk_usage(at).free + _size_of(directory)
    if free < wanted + JOURNAL_BYTES:
        what = (
            f"arena_gb wants {size_text(wanted)} and 64 MiB for the journal; {at} has"
            f" {size_text(free)}"
        )
        fix = (
            "raise the volume's sizeLimit and the sidecar's memory limit (a container's own"
            " /dev/shm is 64 MiB), or lower arena_gb"
        )
        yield subject.error(what, fix)
    else:
        yield subject.ok(f"{size_text(free)} for {size_text(wanted)}")
    if at == directory and stat.S_IMODE(directory.stat().st_mode) & stat.S_IWOTH:
        what = (
            f"arena_path {directory} is world-writable: every user can change the KV that engines"
            " load"
        )
        yield subject.error(what, f"chmod o-w {directory}")


def _socket(subject: Subject, path: Path) -> Finding:
    from lmcache_core.wire.listener import socket_path_problem

    if problem := socket_path_problem(path):
        return subject.error(f"socket_path {problem}", "choose another path")
    if problem := _nearest(path.parent)[1]:
        fix = "choose a path in a directory that the sidecar may write to"
        return subject.error(f"socket_path {path}: {problem}", fix)
    return subject.ok(str(path))


def _mover(subject: Subject, arena_bytes: int) -> Iterator[Finding]:
    """Check what a mover needs for RDMA, where it runs."""
    ports = {
        f"{device.name}:{port.name}": port
        for device in _entries(RDMA_DEVICES)
        for port in _entries(device / "ports")
    }
    if not ports:
        what = "no RDMA device: the mover reads over TCP, where lm:// is faster"
        yield subject.warning(what, "set peer_transport=lm, or ask for the device of a plugin")
        return
    for name, port in ports.items():
        state = _text(port / "state").partition(": ")[2] or "unknown"
        if state != "ACTIVE":
            fix = "connect it, or name another one in UCX_NET_DEVICES"
            yield subject.warning(f"port {name} is {state}", fix)
        elif not any(_text(gid).strip("0:") for gid in _entries(port / "gids")):
            what = f"port {name} has no GID: peers cannot name it"
            yield subject.error(what, "give its network device an address")
        else:
            yield subject.ok(f"port {name} is active")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < arena_bytes and not _may_lock():
        what = f"a process may lock {size_text(limit)}; the arena has {size_text(arena_bytes)}"
        fix = "ulimit -l unlimited, LimitMEMLOCK=infinity, or the capability IPC_LOCK"
        yield subject.error(what, f"{fix} (chart: sidecar.mover.rdmaResource)")


def _may_lock() -> bool:
    found = [line for line in _text(STATUS).splitlines() if line.startswith("CapEff:")]
    return any(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1 for line in found)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # GIDs that are not in use cannot be read
        return ""


def _addresses(subject: Subject, settings: Any) -> Iterator[Finding]:
    """Check that this machine has the addresses to listen at."""
    from lmcache_servicekit.listening import bind

    for host in sorted({host for host, _ in settings.listeners().values()}):
        try:
            bind(host, 0).close()
        except OSError as exc:
            what = f"{host} is not an address of this machine: {exc.strerror or exc}"
            yield subject.warning(what, "listen at an address of the service's machine or pod")


def _disk(subject: Subject, path: Path, wanted: int) -> Finding:
    at, problem = _nearest(path)
    if problem:
        fix = "choose a directory that the service may write to, or chown the volume to its user"
        return subject.error(f"disk_path {path}: {problem}", fix)
    free = shutil.disk_usage(at).free + _size_of(path)
    if free < wanted:
        what = f"disk_gb wants {size_text(wanted)}; {at} has {size_text(free)}"
        fix = "enlarge the volume or lower disk_gb: chunks that do not fit are not kept there"
        return subject.warning(what, fix)
    return subject.ok(f"{size_text(free)} for {size_text(wanted)}")


def _memory(subject: Subject, wanted: int) -> Finding:
    limit = _memory_bytes()
    if limit is not None and limit < wanted:
        what = f"memory_gb wants {size_text(wanted)}; this machine, or its limit, has"
        fix = "raise the container's memory limit or lower memory_gb"
        return subject.error(f"{what} {size_text(limit)}", fix)
    return subject.ok(size_text(wanted))


def _limits(loaded: Sequence[Loaded]) -> Iterator[Finding]:
    subject = Subject("limits", "this machine")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        what = (
            f"a process may open {soft} files (hard limit {hard}); a service holds up to 8192"
            " connections and its files"
        )
        yield subject.warning(what, f"ulimit -n {MIN_OPEN_FILES}, or LimitNOFILE of its unit")
    else:
        yield subject.ok(f"{soft} open files")
    arenas = [int(getattr(one.settings, "arena_gb", 0) * GIB) for one in loaded]
    largest = max(arenas, default=0)
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest and file_size != resource.RLIM_INFINITY and file_size < largest:
        what = (
            f"a file may have {size_text(file_size)}, and the arena is one of {size_text(largest)}"
        )
        yield subject.error(what, "ulimit -f unlimited")


def _nearest(path: Path) -> tuple[Path, str]:
    """Return the path, or the nearest one above it that exists, and why it is not writable."""
    while True:
        try:
            is_directory = stat.S_ISDIR(path.stat().st_mode)
            break
        except (FileNotFoundError, NotADirectoryError) as exc:
            if path == path.parent:
                return path, f"{exc.strerror}"
            path = path.parent
        except (OSError, ValueError) as exc:  # too long, no name at all, or may not be entered
            return path, f"{getattr(exc, 'strerror', None) or exc}"
    if not is_directory:
        return path, f"{path} is not a directory"
    if any(path.resolve().is_relative_to(root) for root in KERNEL_ROOTS):  # root may "write" there
        return path, f"no file can be made in {path}"
    if not os.access(path, os.W_OK | os.X_OK):
        return path, f"user {os.getuid()} may not write to {path}"
    return path, ""


def _size_of(directory: Path) -> int:
    """Return the size of the existing files, which the service reuses; 0 if there is no
    directory.
    """
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(Path(folder) / name).st_blocks * 512
            except OSError:  # removed in the meantime
                continue
    return total


def _file_system(path: Path) -> str:
    """Return the kind of the mount that a path is on."""
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
    """Return this machine's memory, or the limit of its control group."""
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
