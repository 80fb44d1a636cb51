"""How costs scale: short prompts from 1 to 16 processes through one sidecar, a chunk in a cache of
1,000 to 100,000, and an idle service.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import ChunkedTokenDatabase
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

from tests.bench.codec_neighbours import other_load
from tests.bench.engines import running_sidecar
from tests.bench.report import Section
from tests.bench.scale_child import NUM_TOKENS, PROMPT_BYTES
from tests.bench.shape import DTYPE, KVCaches, make_config

NUM_PROCESSES = (1, 4, 16)
NUM_PROMPTS = 1000
"""Of all processes together."""
CALLS = ("store", "lookup", "retrieve")
NUM_RESIDENT = (1_000, 10_000, 100_000)
CHUNK_SIZE, HEAD_SIZE, PROMPT_CHUNKS = 16, 16, 16
NUM_TIMED = 50
"""Prompts of `PROMPT_CHUNKS` chunks of 1 KiB."""
SETTLE_S = 5.0
"""In which engines map the arena in the background."""
NUM_STARTS = 3
IDLE_S = 1.0
SERVICES: dict[str, tuple[str, dict[str, object]]] = {
    "lookup": ("lmcache_lookup", {}),
    "broker": ("lmcache_broker", {}),
    "cache_storage, 1 GiB": ("lmcache_storage", {"lm_port": 0, "memory_gb": 1.0}),
    "sidecar, arena of 1 GiB": ("lmcache_sidecar", {"lm_port": 0, "arena_gb": 1.0}),
}


def measure(
    run: Callable[[str, Callable[[], Any]], Any], directory: Path
) -> tuple[list[Section], str]:
    """Measure all three; takes two minutes.

    Args:
        run: Shows the name of a part while it runs.
        directory: For sockets, settings and logs.

    Returns:
        The tables, and a sentence about other load on the machine.
    """
    load = other_load()
    prompts = [
        row
        for num_processes in NUM_PROCESSES
        for row in run(
            f"short prompts, {num_processes} processes",
            lambda: _prompt_rows(directory, num_processes),  # noqa: B023 (run at once)
        )
    ]
    growth = run("a chunk beside many", lambda: list(_growth_rows()))
    services = run("start of services", lambda: list(_service_rows(directory)))
    sections = [
        Section(
            f"Prompts of {NUM_TOKENS} tokens ({PROMPT_BYTES / 1e6:.2f} MB) through one sidecar, ms",
            ("processes", *(f"{call} {part}" for call in CALLS for part in ("p50", "p99")), ""),
            prompts,
        ),
        Section(
            "A chunk of 1 KiB in host memory, by the number of chunks there",
            ("chunks", "store, µs", "retrieve, µs", "lookup, µs", ""),
            growth,
        ),
        Section(
            "An idle service after its start",
            ("service", "start, s", "processor, s", "memory, MB", "shared memory, MB", ""),
            services,
        ),
    ]
    return sections, f"Other processes used {load:.1f} cores."


def _prompt_rows(directory: Path, num_processes: int) -> Iterator[tuple[str, ...]]:
    """Rows of our engines, and of the least that any engine would do, by the same processes."""
    for is_bare in (False, True):
        seconds = prompt_seconds(directory, num_processes, is_bare)
        cells = (
            f"{percentile(seconds[call], percent) * 1e3:.2f}"
            for call in CALLS
            for percent in (50, 99)
        )
        yield f"{num_processes}{', bare' if is_bare else ''}", *cells, ""


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile."""
    return statistics.quantiles(seconds, n=100)[percent - 1]


def prompt_seconds(directory: Path, num_processes: int, is_bare: bool) -> dict[str, list[float]]:
    """Return the seconds of each call of short prompts through one sidecar. What comes back is
    compared.

    Args:
        directory: For sockets and logs.
        num_processes: Engines at that sidecar.
        is_bare: Instead, the requests and copies that no engine can leave out.
    """
    share = NUM_PROMPTS // num_processes
    options = ("--bare",) if is_bare else ()
    seconds: dict[str, list[float]] = {}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        if is_bare:
            path = folder / "echo.sock"
            _line(opened.enter_context(_child(path, "--echo")))
        else:
            path = opened.enter_context(running_sidecar(folder, 1.25))
        children = [
            opened.enter_context(_child(path, number, share, *options))
            for number in range(num_processes)
        ]
        for child in children:
            _line(child)  # it has started
        time.sleep(0 if is_bare else SETTLE_S)
        for call in CALLS if is_bare else (*CALLS, "check"):
            for child in children:
                assert child.stdin is not None
                child.stdin.write(f"{call}\n")
                child.stdin.flush()
            seconds[call] = [each for child in children for each in json.loads(_line(child))]
    return seconds


@contextmanager
def _child(path: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.bench.scale_child"]
    with subprocess.Popen(
        [*command, str(path), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("an engine has ended; its error is above")
    return line


def _growth_rows() -> Iterator[tuple[str, ...]]:
    metadata = LMCacheEngineMetadata(
        "bench/growth", 1, 0, "vllm", DTYPE, (1, 2, CHUNK_SIZE, 1, HEAD_SIZE)
    )
    config = make_config(chunk_size=CHUNK_SIZE)
    kv, out = _small_kv(), _small_kv()
    number = 0

    def prompts(count: int) -> list[torch.Tensor]:
        nonlocal number
        size = PROMPT_CHUNKS * CHUNK_SIZE
        made = [torch.arange(size) + (number + i) * size for i in range(count)]
        number += count
        return made

    def timed(call: Callable[[torch.Tensor], object], over: list[torch.Tensor]) -> str:
        seconds = []
        for tokens in over:
            began = time.perf_counter()
            call(tokens)
            seconds.append(time.perf_counter() - began)
        return f"{statistics.median(seconds) / PROMPT_CHUNKS * 1e6:.1f}"

    with LMCacheEngine(
        config,
        metadata,
        HostMemoryAllocator(512 << 20),
        ChunkedTokenDatabase(config, metadata),
        VLLMNestedTupleGPUConnector(HEAD_SIZE, 1),
    ) as engine:

        def store(tokens: torch.Tensor) -> None:
            engine.store(tokens, kvcaches=kv)

        def retrieve(tokens: torch.Tensor) -> None:
            if not engine.retrieve(tokens, kvcaches=out).all():
                raise AssertionError("a prompt is not in memory")

        for num_resident in NUM_RESIDENT:
            for tokens in prompts(num_resident // PROMPT_CHUNKS - NUM_TIMED - number):
                store(tokens)
            last = prompts(NUM_TIMED)
            stored = timed(store, last)
            yield (
                f"{num_resident:,}",
                stored,
                timed(retrieve, last),
                timed(engine.lookup, last),
                "",
            )


def _small_kv() -> KVCaches:
    shape = (PROMPT_CHUNKS * CHUNK_SIZE, 1, HEAD_SIZE)
    return ((torch.ones(shape, dtype=DTYPE), torch.ones(shape, dtype=DTYPE)),)


class _Idle(NamedTuple):
    start_s: float
    processor_s: float
    own_mb: float
    shared_mb: float


def _service_rows(directory: Path) -> Iterator[tuple[str, ...]]:
    for name, (module, settings) in SERVICES.items():
        found = [_start(directory, module, settings) for _ in range(NUM_STARTS)]
        middle = _Idle(*(statistics.median(column) for column in zip(*found, strict=True)))
        cells = (f"{middle.start_s:.2f}", f"{middle.processor_s:.2f}")
        yield (name, *cells, f"{middle.own_mb:.0f}", f"{middle.shared_mb:.0f}", "")


def _start(directory: Path, module: str, settings: dict[str, object]) -> _Idle:
    """Start a service, and look at it when it has been idle for a moment."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as arena,
        Processes(Path(folder), quiet_environment()) as processes,
    ):
        own: dict[str, object] = {"port": 0}
        if module == "lmcache_sidecar":
            own |= {"socket_path": f"{folder}/s.sock", "arena_path": arena}
        began = time.perf_counter()
        service, _ = processes.start_service("service", module, own | settings)
        start_s = time.perf_counter() - began
        about = Path("/proc", str(service.process.pid))
        fields = (about / "stat").read_text().rpartition(")")[2].split()
        processor_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        time.sleep(IDLE_S)
        status = (about / "status").read_text()
        own_mb, shared_mb = (
            int(number) * 1024 / 1e6
            for number in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)
        )
        return _Idle(start_s, processor_s, own_mb, shared_mb)
