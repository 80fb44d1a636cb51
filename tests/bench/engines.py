"""The engine, contiguous KV, embedded and through a real sidecar process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import ChunkedTokenDatabase
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

from tests.bench.measure import Figure, in_turn
from tests.bench.shape import (
    HIDDEN,
    NUM_LAYERS,
    NUM_TOKENS,
    TOTAL_BYTES,
    make_config,
    make_kv,
    make_metadata,
    same_bits,
    tokens_of,
)

ARENA_GB = 1.25


@contextmanager
def embedded(verify_hot: str) -> Iterator[LMCacheEngine]:
    """An engine with a memory tier of its own."""
    config = make_config(verify_hot=verify_hot)
    metadata = make_metadata()
    allocator = HostMemoryAllocator(int(ARENA_GB * (1 << 30)))
    engine = LMCacheEngine(
        config,
        metadata,
        allocator,
        ChunkedTokenDatabase(config, metadata),
        VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS),
    )
    engine.open()
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def running_sidecar(directory: Path, arena_gb: float, **settings: object) -> Iterator[Path]:
    """A sidecar in a process of its own; its socket. See `sidecar_process`."""
    with sidecar_process(directory, arena_gb, **settings) as (socket, _):
        yield socket


@contextmanager
def sidecar_process(
    directory: Path, arena_gb: float, **settings: object
) -> Iterator[tuple[Path, int]]:
    """A sidecar in a process of its own; its socket and the number of the process.

    Args:
        directory: For its socket and log.
        arena_gb: Size of its arena.
        **settings: Of its settings file.
    """
    in_memory = (
        "/dev/shm" if Path("/dev/shm").is_dir() else None
    )  # a pod's volume for the arena is one in memory too
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=in_memory) as arena,
        Processes(directory, quiet_environment()) as processes,
    ):
        socket = directory / f"{Path(arena).name}.sock"  # two may run in turn
        common = {"port": 0, "lm_port": 0, "instance_id": "bench", "socket_path": socket}
        common |= {"arena_path": arena, "arena_gb": arena_gb}
        service, _ = processes.start_service("sidecar", "lmcache_sidecar", common | settings)
        yield socket, service.process.pid


@contextmanager
def behind_sidecar(directory: Path, verify_hot: str) -> Iterator[LMCacheEngine]:
    """An engine at a sidecar in a process of its own."""
    with running_sidecar(directory, ARENA_GB, verify_hot=verify_hot) as socket:
        config, metadata = make_config(sidecar_socket=str(socket)), make_metadata()
        engine = LMCacheEngine(
            config,
            metadata,
            None,
            ChunkedTokenDatabase(config, metadata),
            VLLMNestedTupleGPUConnector(HIDDEN, NUM_LAYERS),
        )
        engine.open()
        try:
            yield engine
        finally:
            engine.close()


def measure(
    engine: LMCacheEngine, name: str, copy: Callable[[int], object], notes: tuple[str, str]
) -> list[Figure]:
    """Store and retrieve of the whole prompt, in turn with a plain copy; what came back is
    compared with what was stored.
    """
    kv, target = make_kv(), make_kv(fill=0)
    store, beside_store = in_turn(lambda turn: engine.store(tokens_of(turn), kvcaches=kv), copy)
    last = tokens_of(len(store))
    retrieve, beside_retrieve = in_turn(lambda turn: engine.retrieve(last, kvcaches=target), copy)
    if engine.lookup(last) != NUM_TOKENS or not same_bits(kv, target):
        raise AssertionError(f"{name}: what was retrieved is not what was stored")
    return [
        Figure(f"{name}: store", TOTAL_BYTES, store, note=notes[0], beside=beside_store),
        Figure(f"{name}: retrieve", TOTAL_BYTES, retrieve, note=notes[1], beside=beside_retrieve),
    ]
