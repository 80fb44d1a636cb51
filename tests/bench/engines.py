"""The KV that is moved, 4,096 tokens of a Llama-3.1-8B-shaped model (512 MiB), and engines and
sidecars that move it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine import ChunkStore, LMCacheEngine
from lmcache_core.engine.stores import SidecarClient, create_chunk_store
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.telemetry import Counters
from lmcache_core.token_database import ChunkedTokenDatabase
from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

NUM_TOKENS, CHUNK_SIZE = 4096, 256
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 32, 8, 128
HIDDEN = NUM_HEADS * HEAD_SIZE
DTYPE = torch.bfloat16
TOTAL_BYTES = 2 * NUM_LAYERS * NUM_TOKENS * HIDDEN * 2
CHUNK_BYTES = TOTAL_BYTES * CHUNK_SIZE // NUM_TOKENS
NUM_CHUNKS = NUM_TOKENS // CHUNK_SIZE
ARENA_GB = 1.25
"""Room for two prompts."""
SHARED_MEMORY = Path("/dev/shm")

KVCaches = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""K and V of each layer, `[tokens, heads, head_size]`."""


def tokens_of(turn: int, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    """Return a prompt that no other turn has."""
    return torch.arange(num_tokens) + turn * num_tokens


def small_kv(num_tokens: int) -> KVCaches:
    """Return KV of one layer with 64 bytes a token: a chunk of 16 tokens has 1 KiB."""
    shape = (num_tokens, 1, 16)
    return ((torch.ones(shape, dtype=DTYPE), torch.ones(shape, dtype=DTYPE)),)


def make_config(**options: object) -> LMCacheEngineConfig:
    """Return the configuration of an engine without a remote tier."""
    values: dict[str, object] = {
        "remote_url": None,
        "max_local_cpu_size": ARENA_GB,
        "tier_timeout_s": 60.0,
    }
    return LMCacheEngineConfig.from_defaults(**(values | options))


def make_metadata(
    model: str = "bench/llama-3.1-8b-shape",
    kv_shape: tuple[int, ...] = (NUM_LAYERS, 2, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE),
) -> LMCacheEngineMetadata:
    """Return the identity of that KV, or of another chunk `[layers, 2, tokens, heads, size]`."""
    return LMCacheEngineMetadata(model, 1, 0, "vllm", DTYPE, kv_shape)


@contextmanager
def running_engine(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    connector: Any,
    arena_bytes: int | None = int(ARENA_GB * (1 << 30)),
    database: Callable[[Any, Any], Any] = ChunkedTokenDatabase,
) -> Iterator[LMCacheEngine]:
    """Run an engine.

    Args:
        arena_bytes: Of its own memory tier; None: its sidecar has the memory.
        database: Class of its token database.
    """
    allocator = None if arena_bytes is None else HostMemoryAllocator(arena_bytes)
    made = LMCacheEngine(config, metadata, allocator, database(config, metadata), connector)
    with made:
        yield made


@contextmanager
def running_store(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    client: SidecarClient | None = None,
    arena_bytes: int | None = None,
) -> Iterator[tuple[ChunkStore, Workers]]:
    """Open what an engine keeps its chunks in, and threads for digests.

    Args:
        client: How this process identifies itself to its sidecar.
        arena_bytes: Of its own memory tier; None: its sidecar has the memory.
    """
    workers = Workers("lmcache-digest")
    allocator = None if arena_bytes is None else HostMemoryAllocator(arena_bytes)
    store = create_chunk_store(config, metadata, allocator, Counters(), workers, client)
    workers.open()
    try:
        store.open(lambda salt: None)
        yield store, workers
    finally:
        store.close()
        workers.close()


@contextmanager
def running_sidecar(directory: Path, arena_gb: float, **settings: object) -> Iterator[Path]:
    """Run a sidecar in a process of its own; yield its socket. See `sidecar_process`."""
    with sidecar_process(directory, arena_gb, **settings) as (socket, _):
        yield socket


@contextmanager
def sidecar_process(
    directory: Path, arena_gb: float, **settings: object
) -> Iterator[tuple[Path, int]]:
    """Run a sidecar in a process of its own; yield its socket and its process id.

    Args:
        directory: For its socket and log.
        settings: Of its settings file.
    """
    # A pod's volume for the arena is in memory too.
    in_memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=in_memory) as arena,
        Processes(directory, quiet_environment()) as processes,
    ):
        socket = directory / f"{Path(arena).name}.sock"  # several may run at once
        common = {"port": 0, "lm_port": 0, "instance_id": "bench", "socket_path": socket}
        common |= {"arena_path": arena, "arena_gb": arena_gb}
        service, _ = processes.start_service("sidecar", "lmcache_sidecar", common | settings)
        yield socket, service.process.pid
