"""The machine: GPU, link, NUMA, and what copies and pinning cost without us."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from lmcache_core.memory.tensor import COPY_BOUNDARY_BYTES, copy_parts, host_arena, pin

from tests.bench.measure import Figure, timed
from tests.gpu.report import Report

QUERY = (  # as `table` reads it
    "name",
    "driver_version",
    "memory.total",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "compute_cap",
)
SHARED_MEMORY = Path("/dev/shm")


def run(report: Report) -> None:
    """Facts, and the limits that everything else is held against."""
    report.note("torch", text=torch.__version__, cuda=torch.version.cuda)
    if not report.is_dry:
        report.note("GPU", text=torch.cuda.get_device_name())
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    report.note("NUMA nodes", value=len(nodes))
    for num_bytes in [1 << 20] if report.is_dry else [1 << 20, 32 << 20, 1 << 30]:
        _copies(report, num_bytes)
    # After the copies: an idle link shows a lower speed.
    if shutil.which("nvidia-smi"):
        asked = [f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
        done = subprocess.run(
            ["nvidia-smi", *asked], capture_output=True, text=True, timeout=20, check=False
        )
        if done.returncode == 0:
            report.note("nvidia-smi", text=done.stdout.strip())
    for num_bytes in [1 << 20] if report.is_dry else [1 << 30, 8 << 30]:
        _registration(report, num_bytes)
    _straddling(report)


class Owner:
    """Its end unpins an arena."""


def _copies(report: Report, num_bytes: int) -> None:
    """Between host and device, pageable and pinned, and on the device."""
    host = torch.zeros(num_bytes, dtype=torch.uint8)
    pinned = host if report.is_dry else host.pin_memory()
    device, other = (
        torch.zeros(num_bytes, dtype=torch.uint8, device=report.device) for _ in range(2)
    )
    ways: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "pageable to device": (host, device),
        "pinned to device": (pinned, device),
        "device to pageable": (device, host),
        "device to pinned": (device, pinned),
        "on the device": (device, other),
    }

    for name, (source, target) in ways.items():
        figure = Figure(
            f"{name}, {num_bytes >> 20} MiB", num_bytes, timed(report.copying(source, target))
        )
        report.figure(figure)


def _registration(report: Report, num_bytes: int) -> None:
    """Pinning of shared memory that is already touched, as a sidecar's arena is."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(num_bytes)
        arena = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
        arena.zero_()
        owner = Owner()
        began = time.perf_counter()
        is_pinned = pin(arena, owner)
        seconds = time.perf_counter() - began
        report.note(
            f"pin {num_bytes >> 20} MiB of shared memory",
            seconds=round(seconds, 4),
            is_pinned=is_pinned,
        )
        if is_pinned is report.is_dry:
            raise AssertionError("the arena was not pinned")


def _straddling(report: Report) -> None:
    """Whether CUDA takes a copy that touches two registrations, and that copies in parts work."""
    num_bytes = 2 * mmap.PAGESIZE if report.is_dry else 2 * COPY_BOUNDARY_BYTES
    arena, owner = host_arena(num_bytes), Owner()
    if pin(arena, owner, piece_bytes=COPY_BOUNDARY_BYTES) is report.is_dry:
        raise AssertionError("the arena was not pinned")
    at = COPY_BOUNDARY_BYTES - arena.data_ptr() % COPY_BOUNDARY_BYTES
    at = mmap.PAGESIZE if report.is_dry else at
    host = arena[at - mmap.PAGESIZE : at + mmap.PAGESIZE]
    device = torch.zeros(len(host), dtype=torch.uint8, device=report.device)
    for name, target, source in (("to device", device, host), ("from device", host, device)):
        text = "works"
        try:
            target.copy_(source, non_blocking=True)
            report.wait()
        except RuntimeError as exc:
            text = str(exc).splitlines()[0]
        report.note(f"one copy across two registrations, {name}", text=text)
    wanted = (torch.arange(len(host)) % 251).to(torch.uint8)
    host.copy_(wanted)
    for part in copy_parts(host):
        device[part].copy_(host[part], non_blocking=True)
    report.wait()
    report.equal("copies up to where registrations end", device, wanted)
