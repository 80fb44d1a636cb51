"""The section `scale` of docs/benchmarks.md: short prompts from 1 to 16 processes through one
sidecar, a chunk in a cache of 1,000 to 100,000, and an idle service.

`python -m tests.bench.scale SOCKET NUMBER NUM_PROMPTS [--bare]` is one of these processes: it obeys
the lines `store`, `lookup`, `retrieve` and `check`, and answers each with the seconds of every
call. With `--bare` calls do only what no engine can leave out: as many requests of a few bytes, to
the server that `SOCKET --echo` is, and a copy of the KV.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import uvloop
from lmcache_core._typing import override
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

from tests.bench.child import Child
from tests.bench.engines import (
    DTYPE,
    SHARED_MEMORY,
    KVCaches,
    make_config,
    make_metadata,
    running_engine,
    running_sidecar,
    small_kv,
    tokens_of,
)
from tests.bench.measure import Run, other_load, percentile, processor_seconds
from tests.bench.report import Findings, Section

NUM_PROCESSES = (1, 4, 16)
NUM_PROMPTS = 1000
"""Of all processes together."""
CALLS = ("store", "lookup", "retrieve")
SETTLE_S = 5.0
"""In which engines map the arena in the background."""

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 12, 2, 32
NUM_TOKENS = 256
PROMPT_BYTES = 2 * NUM_LAYERS * NUM_TOKENS * NUM_HEADS * HEAD_SIZE * 2
"""The demo's first model, one chunk."""
REQUEST_BYTES = 64

NUM_RESIDENT = (1_000, 10_000, 100_000)
SMALL_TOKENS, PROMPT_CHUNKS, NUM_TIMED = 16, 16, 50

NUM_STARTS = 3
IDLE_S = 1.0
SERVICES: dict[str, tuple[str, dict[str, object]]] = {
    "lookup": ("lmcache_lookup", {}),
    "broker": ("lmcache_broker", {}),
    "cache_storage, 1 GiB": ("lmcache_storage", {"lm_port": 0, "memory_gb": 1.0}),
    "sidecar, arena of 1 GiB": ("lmcache_sidecar", {"lm_port": 0, "arena_gb": 1.0}),
}


def measure(run: Run, directory: Path) -> Findings:
    """Measure all three; takes two minutes.

    Args:
        directory: For sockets, settings and logs.
    """
    load = other_load()
    prompts = [
        row
        for number in NUM_PROCESSES
        for row in run(
            f"short prompts, {number} processes",
            lambda: list(_prompt_rows(directory, number)),  # noqa: B023 (run at once)
        )
    ]
    growth = run("a chunk among many", lambda: list(_growth_rows()))
    services = run(
        "start of services", lambda: [_service_row(directory, name) for name in SERVICES]
    )
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
    return Findings(sections, [f"Other processes used {load:.1f} cores."])


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


def prompt_seconds(
    directory: Path, num_processes: int, is_bare: bool, num_prompts: int = NUM_PROMPTS
) -> dict[str, list[float]]:
    """Return the seconds of each call of short prompts through one sidecar. What comes back is
    compared.

    Args:
        directory: For sockets and logs.
        is_bare: Instead, the requests and copies that no engine can leave out.
        num_prompts: Of all processes together.
    """
    seconds: dict[str, list[float]] = {}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        if is_bare:
            path = folder / "echo.sock"
            opened.enter_context(_child(path, "--echo")).answer()
        else:
            path = opened.enter_context(running_sidecar(folder, 1.25))
        options = (num_prompts // num_processes, *(("--bare",) if is_bare else ()))
        children = [
            opened.enter_context(_child(path, number, *options)) for number in range(num_processes)
        ]
        for child in children:
            child.answer()  # it has started
        time.sleep(0 if is_bare else SETTLE_S)
        for call in CALLS if is_bare else (*CALLS, "check"):
            for child in children:
                child.send(call)
            seconds[call] = [each for child in children for each in child.answer()]
    return seconds


def _child(*arguments: object) -> Child:
    return Child([sys.executable, "-m", "tests.bench.scale", *map(str, arguments)])


def _growth_rows() -> Iterator[tuple[str, ...]]:
    metadata = make_metadata("bench/growth", (1, 2, SMALL_TOKENS, 1, 16))
    prompt_tokens = PROMPT_CHUNKS * SMALL_TOKENS
    kv, out = small_kv(prompt_tokens), small_kv(prompt_tokens)
    numbers = itertools.count()

    def prompts(count: int) -> list[torch.Tensor]:
        return [tokens_of(next(numbers), prompt_tokens) for _ in range(count)]

    def per_chunk(call: Callable[[torch.Tensor], object], over: list[torch.Tensor]) -> str:
        seconds = []
        for tokens in over:
            began = time.perf_counter()
            call(tokens)
            seconds.append(time.perf_counter() - began)
        return f"{statistics.median(seconds) / PROMPT_CHUNKS * 1e6:.1f}"

    config, connector = make_config(chunk_size=SMALL_TOKENS), VLLMNestedTupleGPUConnector(16, 1)
    with running_engine(config, metadata, connector, 512 << 20) as engine:

        def store(tokens: torch.Tensor) -> None:
            engine.store(tokens, kvcaches=kv)

        def retrieve(tokens: torch.Tensor) -> None:
            if not engine.retrieve(tokens, kvcaches=out).all():
                raise AssertionError("a prompt is not in memory")

        num_prompts = 0
        for num_resident in NUM_RESIDENT:
            for tokens in prompts(num_resident // PROMPT_CHUNKS - NUM_TIMED - num_prompts):
                store(tokens)
            last = prompts(NUM_TIMED)
            num_prompts = num_resident // PROMPT_CHUNKS
            cells = (per_chunk(call, last) for call in (store, retrieve, engine.lookup))
            yield (f"{num_resident:,}", *cells, "")


def _service_row(directory: Path, name: str) -> tuple[str, ...]:
    found = [_start(directory, *SERVICES[name]) for _ in range(NUM_STARTS)]
    start_s, processor_s, own_mb, shared_mb = map(statistics.median, zip(*found, strict=True))
    return (name, f"{start_s:.2f}", f"{processor_s:.2f}", f"{own_mb:.0f}", f"{shared_mb:.0f}", "")


def _start(directory: Path, module: str, settings: dict[str, object]) -> tuple[float, ...]:
    """Start a service, and look at it when it has been idle for a moment.

    Returns:
        Seconds until it listens, its processor seconds by then, and MB of its own and of shared
        memory.
    """
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as arena,
        Processes(Path(folder), quiet_environment()) as processes,
    ):
        own: dict[str, object] = {"port": 0}
        if module == "lmcache_sidecar":
            own |= {"socket_path": f"{folder}/s.sock", "arena_path": arena}
        began = time.perf_counter()
        service, _ = processes.start_service("service", module, own | settings)
        start_s = time.perf_counter() - began
        processor_s = processor_seconds(service.process.pid)
        time.sleep(IDLE_S)
        status = Path(f"/proc/{service.process.pid}/status").read_text(encoding="utf-8")
        resident = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)
        return (start_s, processor_s, *(int(kib) * 1024 / 1e6 for kib in resident))


# --- The process of an engine ---------------------------------------------------------------------


class _Prompts:
    """The prompts of one engine, each with the calls that are timed.

    Args:
        engine: Stores and retrieves them; `_BareCalls` checks nothing.
        number: Of the engine.
    """

    def __init__(self, engine: LMCacheEngine | _BareCalls, number: int, num_prompts: int) -> None:
        self._engine = engine
        first = number * num_prompts
        self._prompts = [tokens_of(first + i, NUM_TOKENS) for i in range(num_prompts)]
        self._kv, self._out = _kv(number + 1), _kv(0)

    def store(self, tokens: torch.Tensor) -> None:
        self._engine.store(tokens, kvcaches=self._kv)

    def lookup(self, tokens: torch.Tensor) -> None:
        if self._engine.lookup(tokens) != NUM_TOKENS:
            raise AssertionError("a prompt is not found")

    def retrieve(self, tokens: torch.Tensor) -> None:
        if not self._engine.retrieve(tokens, kvcaches=self._out).all():
            raise AssertionError("a prompt does not come back")

    def check(self, tokens: torch.Tensor) -> None:
        """Load it, and compare."""
        for side in itertools.chain(*self._out):
            side.zero_()
        self.retrieve(tokens)
        for was, now in zip(itertools.chain(*self._kv), itertools.chain(*self._out), strict=True):
            if not torch.equal(was, now):
                raise AssertionError("other bytes than were stored came back")

    def all(self, call: str) -> list[float]:
        """Return the seconds of a call for each prompt."""
        seconds = []
        for tokens in self._prompts:
            began = time.perf_counter()
            getattr(self, call)(tokens)
            seconds.append(time.perf_counter() - began)
        return seconds


class _BareCalls:
    """Stands for an engine: what its calls cost at least.

    Args:
        path: Socket of the echo server.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._memory = torch.zeros(PROMPT_BYTES, dtype=torch.uint8)

    def store(self, tokens: torch.Tensor, kvcaches: KVCaches) -> None:
        """Ask for memory, fill it, and publish."""
        self._ask()
        self._copy(kvcaches, is_load=False)
        self._ask()

    def lookup(self, tokens: torch.Tensor) -> int:
        self._ask()
        return NUM_TOKENS

    def retrieve(self, tokens: torch.Tensor, kvcaches: KVCaches) -> torch.Tensor:
        """Ask where it is, copy it, and say so."""
        self._ask()
        self._copy(kvcaches, is_load=True)
        self._ask()
        return torch.ones(1, dtype=torch.bool)

    def _ask(self) -> None:
        self._socket.sendall(bytes(REQUEST_BYTES))
        if len(self._socket.recv(REQUEST_BYTES)) != REQUEST_BYTES:
            raise AssertionError("an answer came in parts")

    def _copy(self, kvcaches: KVCaches, is_load: bool) -> None:
        sides = [side.view(torch.uint8).view(-1) for side in itertools.chain(*kvcaches)]
        for side, memory in zip(sides, self._memory.chunk(len(sides)), strict=True):
            (side.copy_(memory) if is_load else memory.copy_(side))


class _Echo(asyncio.Protocol):
    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def _echo(path: str) -> None:
    """Serve until stdin ends."""
    await asyncio.get_running_loop().create_unix_server(_Echo, path)
    print("1", flush=True)
    await asyncio.to_thread(sys.stdin.read)


def _kv(value: int) -> KVCaches:
    shape = (NUM_TOKENS, NUM_HEADS, HEAD_SIZE)
    return tuple(
        (torch.full(shape, value + i, dtype=DTYPE), torch.full(shape, -value - i, dtype=DTYPE))
        for i in range(NUM_LAYERS)
    )


def _obey(prompts: _Prompts) -> None:
    gc.collect()  # otherwise some call of some run pays 0.1 s for the objects of all imports
    gc.freeze()
    print("1", flush=True)
    for line in sys.stdin:
        print(json.dumps(prompts.all(line.strip())), flush=True)


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    path, *rest = sys.argv[1:]
    if rest == ["--echo"]:
        uvloop.run(_echo(path))
        return
    number, num_prompts = map(int, rest[:2])
    if rest[2:] == ["--bare"]:
        _obey(_Prompts(_BareCalls(path), number, num_prompts))
        return
    config = make_config(sidecar_socket=path)
    shape = (NUM_LAYERS, 2, NUM_TOKENS, NUM_HEADS, HEAD_SIZE)
    metadata = make_metadata("bench/small-prompts", shape)
    connector = VLLMNestedTupleGPUConnector(NUM_HEADS * HEAD_SIZE, NUM_LAYERS)
    with running_engine(config, metadata, connector, None) as engine:
        _obey(_Prompts(engine, number, num_prompts))


if __name__ == "__main__":
    main()
