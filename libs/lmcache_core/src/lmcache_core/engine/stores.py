"""Selects the engine's chunk store: embedded tiers or the pod's sidecar; traced if configured."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.errors import ConfigError
from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.record.chunk_store import ChunkStore
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.request_context import Carried, RequestIds, working_for
from lmcache_core.telemetry.tracing import Tracer
from lmcache_core.token_database import identity_root

if TYPE_CHECKING:
    from lmcache_core.sidecar import SidecarChunkStore
    from lmcache_core.wire.messages import Describe

BYTES_PER_GB = 1 << 30
TRACED = frozenset({"lookup", "prefetch", "stage", "reserve", "put", "get"})
"""Calls of a chunk store that may reach a tier."""


@dataclass(frozen=True)
class SidecarClient:
    """How this process identifies itself to the sidecar.

    Attributes:
        name: Name of the engine, the same for all of its processes.
        groups: Layer groups that chunks are stored for, by their names in keys; empty: this process
            does not name chunks.
        loads_beside: Whether one thread loads while another one stores.
        decodes: Encodings of records that this process loads, in addition to raw (`encoding_of`).
        chunk_bytes: Size of the largest payload of a chunk that this process can use, decoded; 0 if
            unknown.
        role: vLLM's `kv_role` of the engine; "" for another engine.
    """

    name: str
    groups: tuple[str, ...] = ("",)
    loads_beside: bool = False
    decodes: tuple[str, ...] = ()
    chunk_bytes: int = 0
    role: str = ""


def create_chunk_store(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    memory_allocator: MemoryAllocatorInterface | None,
    counters: Counters,
    workers: Workers | None = None,
    client: SidecarClient | None = None,
) -> ChunkStore:
    """Return the chunk store that the config selects; not opened.

    Args:
        memory_allocator: Host memory for chunks; only in embedded mode.
        workers: Threads for digests.
        client: How this process identifies itself to the sidecar; by default as a separate engine.

    Raises:
        ConfigError: Embedded mode lacks an allocator, or tracing lacks a package that it needs.
    """
    client = client or SidecarClient(f"engine-{os.getpid()}")
    store: ChunkStore
    if config.sidecar_socket is not None:
        store = sidecar_store(config, metadata, counters, workers, client)
    elif memory_allocator is None:
        raise ConfigError(
            "memory_allocator=None: embedded mode needs host memory for chunks (or set"
            " sidecar_socket)"
        )
    else:
        from lmcache_core.storage.manager import StorageManager

        most_bytes = client.chunk_bytes or None
        store = StorageManager(config, memory_allocator, counters, workers, most_bytes)
    if config.otlp_endpoint is None:
        return store
    from lmcache_core.telemetry.tracing import open_tracer

    ratio = config.trace_sample_ratio
    tracer = open_tracer(config.otlp_endpoint, "lmcache-engine", client.name, ratio)
    return store if tracer is None else cast("ChunkStore", TracedChunkStore(store, tracer))


def sidecar_store(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    counters: Counters,
    workers: Workers | None,
    client: SidecarClient,
) -> SidecarChunkStore:
    """Return the store of a config with a sidecar's socket; not opened."""
    from lmcache_core.sidecar import SidecarChunkStore
    from lmcache_core.wire.capabilities import (
        CHUNK_BYTES_PREFIX,
        ON_DEVICE,
        ROLE_PREFIX,
        SERDE_PREFIX,
    )
    from lmcache_core.wire.messages import Describe, EngineInfo, engine_hello

    engine = EngineInfo(
        client.name,
        os.getpid(),
        metadata.worker_id,
        metadata.model_name,
        metadata.layout_fingerprint(),
        metadata.world_size,
    )
    on_device = [ON_DEVICE] if torch.cuda.is_available() else []
    decodes = [SERDE_PREFIX + encoding for encoding in client.decodes]
    largest = [f"{CHUNK_BYTES_PREFIX}{client.chunk_bytes}"] if client.chunk_bytes else []
    role = [f"{ROLE_PREFIX}{client.role}"] if client.role else []
    hello = engine_hello(engine, [*on_device, *largest, *role, *decodes])

    def describe(salt: str) -> Describe:
        root = identity_root(metadata, salt)
        fmt, model_name, world_size = metadata.fmt, metadata.model_name, metadata.world_size
        return Describe(fmt, model_name, world_size, config.chunk_size, root, client.groups)

    return SidecarChunkStore(
        Path(cast("str", config.sidecar_socket)),
        hello,
        config.tier_timeout_s,
        counters,
        workers,
        describe if client.groups else None,
        client.loads_beside,
    )


class TracedChunkStore:
    """A `ChunkStore` that traces another one: each call that may reach a tier is a span, and has an
    id for the logs of every component involved. A trace begins here.

    Args:
        tracer: Receives the spans; closed with the store.
    """

    def __init__(self, store: ChunkStore, tracer: Tracer) -> None:
        self._store = store
        self._tracer = tracer
        self._ids = RequestIds()

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._store, name)
        return functools.partial(self._traced, name, method) if name in TRACED else method

    def _traced(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        came = Carried(self._ids.next())
        with working_for(f"engine {name}", came, self._tracer, is_server=False):
            return method(*args, **kwargs)

    def close(self) -> None:
        """Close the store, then the tracer."""
        try:
            self._store.close()
        finally:
            self._tracer.close()
