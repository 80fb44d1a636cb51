"""Where both engines of `peers` keep KV, and the limits of the machine there."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

from tests.bench.engines import CHUNK_BYTES, SHARED_MEMORY, running_sidecar
from tests.bench.limits import copy_work, new_mapping_work, redis_limits, socket_limit
from tests.bench.peer_child import Shape
from tests.bench.tiers import drop_from_cache
from tests.fixtures.ports import free_port
from tests.fixtures.redis_server import running_redis

ROOT = Path(__file__).resolve().parents[2]
LMCACHE_PYTHON = ROOT / ".lmcache" / "venv" / "bin" / "python"
START_TIMEOUT_S = 120.0
PROMPTS_BACKED = 3

Engine = tuple[str, str, dict[str, Any]]
"""Kind for `peer_child`, tier by its name in `lookup`, and options."""


@dataclass
class Place:
    """Where KV is kept, for both engines.

    Attributes:
        limit: What the limits are.
        store_limit: Moves the same bytes there as fast as the machine can; returns the seconds.
        retrieve_limit: Moves them back, likewise.
        first_store_limit: Like `store_limit` for the first store of a client, with what it is;
            None: the same.
        delay: Rounds between storing and retrieving a prompt: one for slower tiers, when memory no
            longer holds it.
        use_memory: Uses free memory of the machine once and frees it, before each store: a host
            may have taken it back, and its first use is several times slower. None where memory is
            held from the start, or is not backed.
        num_clients: How many times the engines start; each time their first round is a row of its
            own.
        lookup: What is measured of lookups: the "lookup" itself, the "first lookup" after a rest,
            or nothing.
        make_cold: Leaves nothing of what was stored in the page cache; None: nothing is there.
        without_digests: Options with which our engine computes no digests; it is measured too.
    """

    name: str
    ours: Engine
    peer: Engine
    limit: str
    store_limit: Callable[[], float]
    retrieve_limit: Callable[[], float]
    shape: Shape
    delay: int = 1
    use_memory: Callable[[], object] | None = None
    num_clients: int = 1
    lookup: str = ""
    make_cold: Callable[[], None] | None = None
    without_digests: dict[str, Any] | None = None
    first_store_limit: tuple[str, Callable[[], float]] | None = None

    @property
    def engines(self) -> dict[str, Engine]:
        """All engines by name."""
        found = {"ours": self.ours, "peer": self.peer}
        if self.without_digests is not None:
            kind, tier, options = self.ours
            found["without_digests"] = kind, tier, options | self.without_digests
        return found


@contextmanager
def memory(directory: Path, num_tokens: int, is_paged: bool) -> Iterator[Place]:
    """Memory of the process."""
    shape = Shape(num_tokens, is_paged)
    copy = _timed(partial(copy_work(shape.num_bytes), 0))
    room = {"max_local_cpu_size": 2.5 * shape.num_bytes / 2**30}
    yield Place(
        "hot, paged NHD" if is_paged else "hot, contiguous",
        ("ours", "Hot", room | {"remote_url": None}),
        ("lmcache", "LocalCPUBackend", room | {"local_cpu": True}),
        "copy, one thread",
        copy,
        copy,
        shape,
        delay=0,
        lookup="" if is_paged else "first lookup",
        without_digests={"verify_hot": "never"},
    )


@contextmanager
def sidecar(directory: Path, num_tokens: int) -> Iterator[Place]:
    """Memory of another process on the machine, shared with the engine."""
    shape = Shape(num_tokens, is_paged=True)
    copy = _timed(partial(copy_work(shape.num_bytes), 0))
    arena_gb = 2.5 * shape.num_bytes / 2**30
    port = free_port()
    options = f"--port={port}", f"--l1-size-gb={arena_gb}", f"--chunk-size={shape.chunk_size}"
    # The fastest of its ways on a CPU: the client copies between its pages and shared memory.
    way = "--supported-transfer-mode=engine_driven", f"--shm-name=lmcache-bench-{os.getpid()}"
    rest = "--host=127.0.0.1", "--eviction-policy=LRU", "--disable-observability"
    module = "lmcache.v1.multiprocess.server"
    with (
        running_sidecar(directory, arena_gb) as path,
        running_sidecar(directory, arena_gb, verify_hot="never") as without_digests,
        new_mapping_work(shape.num_bytes) as copy_to_new_mapping,
        _lmcache_server(directory, port, module, *options, *way, *rest),
    ):
        yield Place(
            "sidecar, paged NHD",
            ("ours", "Hot", {"sidecar_socket": str(path)}),
            ("lmcache-mp", "", {"url": f"tcp://127.0.0.1:{port}"}),
            "copy, one thread",
            copy,
            copy,
            shape,
            delay=0,
            num_clients=3,
            without_digests={"sidecar_socket": str(without_digests)},
            first_store_limit=("copy to a new mapping", copy_to_new_mapping),
        )


@contextmanager
def disk(directory: Path, num_tokens: int, is_backed: bool) -> Iterator[Place]:
    """Files, not synced."""
    shape = Shape(num_tokens)
    size = shape.num_bytes
    data = memoryview(bytearray(secrets.token_bytes(1 << 20) * (size >> 20)))
    target = memoryview(bytearray(size))
    folder = directory / f"disk-{is_backed}"
    folder.mkdir()
    file = folder / "raw"

    def write() -> None:
        file.unlink(missing_ok=True)  # ext4 writes a file at once that replaces another one
        with file.open("wb", buffering=0) as raw:
            for at in range(0, size, CHUNK_BYTES):
                raw.write(data[at : at + CHUNK_BYTES])

    def read() -> None:
        with file.open("rb", buffering=0) as raw:
            for at in range(0, size, CHUNK_BYTES):
                raw.readinto(target[at : at + CHUNK_BYTES])

    def options(name: str) -> dict[str, Any]:
        (folder / name).mkdir()
        path = f"file://{folder / name}/"
        return {"local_disk": path, "max_local_disk_size": 12 * size / 2**30}

    def use_page_cache() -> None:
        # Memory that a process has freed is not what the kernel takes for files.
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as raw:
            for _ in range(PROMPTS_BACKED):
                raw.write(target)
        filler.unlink()

    def make_cold() -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                drop_from_cache(path)

    room = _little_room(shape)
    yield Place(
        f"disk, no fsync{_memory_of(is_backed)}",
        ("ours", "LocalDiskBackend", room | {"remote_url": None} | options("ours")),
        ("lmcache", "LocalDiskBackend", room | {"local_cpu": False} | options("lmcache")),
        "raw write, raw read",
        _timed(write),
        _timed(read),
        shape,
        use_memory=use_page_cache if is_backed else None,
        lookup="lookup" if is_backed else "",
        make_cold=make_cold if is_backed else None,
    )


@contextmanager
def lm(directory: Path, num_tokens: int, is_backed: bool) -> Iterator[Place]:
    """A server over loopback: each its own."""
    shape = Shape(num_tokens)
    port = free_port()
    # Room for all rounds, like LMCache's server, which has no bound.
    memory_gb = 8 * shape.num_bytes / 2**30
    settings = {"port": 0, "lm_port": 0, "memory_gb": memory_gb, "instance_id": "bench"}
    with (
        Processes(directory, quiet_environment()) as processes,
        _lmcache_server(directory, port, "lmcache.v1.server", "127.0.0.1", str(port), "cpu"),
    ):
        _, ports = processes.start_service("cache_storage", "lmcache_storage", settings)

        def move() -> float:
            return socket_limit(1, shape.num_bytes // CHUNK_BYTES).seconds[0]

        room = _little_room(shape)
        ours, peer = (f"lm://127.0.0.1:{number}" for number in (ports["lm_port"], port))
        yield Place(
            f"lm://, each its own server{_memory_of(is_backed)}",
            ("ours", "RemoteBackend", room | {"remote_url": ours}),
            ("lmcache", "RemoteBackend", room | {"local_cpu": False, "remote_url": peer}),
            "socket, recv_into",
            move,
            move,
            shape,
            use_memory=_memory_user(shape) if is_backed else None,
            lookup="first lookup" if is_backed else "",
        )


@contextmanager
def redis(directory: Path, num_tokens: int, is_backed: bool) -> Iterator[Place]:
    """A Redis over loopback, shared by both."""
    shape = Shape(num_tokens)
    with running_redis("--maxmemory", "9gb") as server:
        store, retrieve = redis_limits(server.port, shape.num_bytes // CHUNK_BYTES)
        room = _little_room(shape) | {"remote_url": server.url}
        naive = {"local_cpu": False, "remote_serde": "naive"}
        yield Place(
            f"Redis{_memory_of(is_backed)}",
            ("ours", "RemoteBackend", room),
            ("lmcache", "RemoteBackend", room | naive),
            "raw SET, raw GET, recv_into",
            _timed(store),
            _timed(retrieve),
            shape,
            use_memory=_memory_user(shape) if is_backed else None,
            lookup="first lookup" if is_backed else "",
        )


@contextmanager
def vllm_offloading(directory: Path, num_tokens: int) -> Iterator[Place]:
    """Tiers behind vLLM's own offloading, both in memory: its files, and our sidecar."""
    shape = Shape(num_tokens)
    copy = _timed(partial(copy_work(shape.num_bytes), 0))
    with ExitStack() as opened:
        # Room for all rounds, like a folder, which has no bound.
        path = opened.enter_context(running_sidecar(directory, 8 * shape.num_bytes / 2**30))
        files = opened.enter_context(
            tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=SHARED_MEMORY)
        )
        ours = {
            "type": "LMCacheTier",
            "module_path": "lmcache_core.integrations.vllm_tier",
            "sidecar_socket": str(path),
            "identity": "bench",
        }
        yield Place(
            "tier behind vLLM's host memory (peer: vLLM's file tier, in memory)",
            ("vllm-ours", "", {"tier": ours}),
            ("vllm-fs", "", {"tier": {"type": "fs", "root_dir": files}}),
            "copy, one thread",
            copy,
            copy,
            shape,
        )


PLACES: dict[str, Callable[[Path, int], Any]] = {
    "memory": partial(memory, is_paged=False),
    "paged": partial(memory, is_paged=True),
    "sidecar": sidecar,
    "disk": partial(disk, is_backed=True),
    "disk-unbacked": partial(disk, is_backed=False),
    "lm": partial(lm, is_backed=True),
    "lm-unbacked": partial(lm, is_backed=False),
    "redis": partial(redis, is_backed=True),
    "redis-unbacked": partial(redis, is_backed=False),
    "vllm-tiers": vllm_offloading,
}


def peer_environment() -> dict[str, str]:
    """Return the environment of a process of LMCache."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LMCACHE_", "PYTHONPATH"))
    }
    return kept | {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _little_room(shape: Shape) -> dict[str, float]:
    """Slightly more than one prompt: a prompt retrieved a round later has been evicted."""
    return {"max_local_cpu_size": 1.2 * shape.num_bytes / 2**30}


def _memory_user(shape: Shape) -> Callable[[], object]:
    """Return a function that uses free memory of the machine once, and frees it."""
    return partial(torch.ones, PROMPTS_BACKED * shape.num_bytes, dtype=torch.uint8)


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    """Return work that returns its seconds."""

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def _memory_of(is_backed: bool) -> str:
    return ", memory backed" if is_backed else ", memory not backed"


@contextmanager
def _lmcache_server(directory: Path, port: int, module: str, *arguments: str) -> Iterator[None]:
    """Run a server of LMCache's, listening on `port`."""
    with (directory / f"{module}-{port}.log").open("wb") as log:
        server = subprocess.Popen(
            [str(LMCACHE_PYTHON), "-m", module, *arguments],
            env=peer_environment(),
            stdout=log,
            stderr=log,
        )
    try:
        _await_port(port, server)
        yield
    finally:
        server.terminate()  # killed, it would leave its shared memory
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline or server.poll() is not None:
                raise
            time.sleep(0.1)
        else:
            return
