"""Chooses, once, the chunk store of the engine: embedded tiers or the pod's sidecar."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.errors import ConfigError
from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.record.chunk_store import ChunkStore
from lmcache_core.telemetry import Counters
from lmcache_core.token_database import identity_root

if TYPE_CHECKING:
    from lmcache_core.sidecar.messages import Describe, Hello


@dataclass(frozen=True)
class SidecarClient:
    """How this process identifies itself to the sidecar.

    Attributes:
        name: Names the engine, the same for all of its processes; by default this process.
        groups: Layer groups that chunks are stored for, by their names in keys; none: this process
            does not name chunks.
        loads_beside: Whether one thread loads while another one stores.
    """

    name: str = ""
    groups: tuple[str, ...] = ("",)
    loads_beside: bool = False


NAMELESS = SidecarClient()


def create_chunk_store(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    memory_allocator: MemoryAllocatorInterface | None,
    counters: Counters,
    workers: Workers | None = None,
    client: SidecarClient = NAMELESS,
) -> ChunkStore:
    """Return the chunk store that the config names; not opened. Traced where the config says so.

    Args:
        config: Options.
        metadata: What the KV is.
        memory_allocator: Host memory for chunks; only in embedded mode.
        counters: Where misses are counted.
        workers: Threads for digests.
        client: How this process is to the sidecar.

    Raises:
        ConfigError: Embedded mode without an allocator, or traces without the packages that they
            need.
    """
    store = _create(config, metadata, memory_allocator, counters, workers, client)
    if config.otlp_endpoint is None:
        return store
    from lmcache_core.engine.traced_store import TracedChunkStore
    from lmcache_core.telemetry.tracing import open_tracer

    name = client.name or f"engine-{os.getpid()}"
    tracer = open_tracer(config.otlp_endpoint, "lmcache-engine", name, config.trace_sample_ratio)
    return store if tracer is None else TracedChunkStore(store, tracer)


def _create(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    memory_allocator: MemoryAllocatorInterface | None,
    counters: Counters,
    workers: Workers | None,
    client: SidecarClient,
) -> ChunkStore:
    if config.sidecar_socket is not None:
        from lmcache_core.sidecar import SidecarChunkStore

        hello = _hello(metadata, client.name or f"engine-{os.getpid()}")
        described = _describing(config, metadata, client.groups) if client.groups else None
        path, timeout_s = Path(config.sidecar_socket), config.tier_timeout_s
        return SidecarChunkStore(
            path, hello, timeout_s, counters, workers, described, client.loads_beside
        )
    if memory_allocator is None:
        raise ConfigError(
            "memory_allocator=None: embedded mode needs host memory for chunks (or set"
            " sidecar_socket)"
        )
    from lmcache_core.storage.manager import StorageManager

    return StorageManager(config, memory_allocator, counters, workers)


def _hello(metadata: LMCacheEngineMetadata, client: str) -> Hello:
    from lmcache_core.sidecar.messages import CAPABILITIES, ON_DEVICE, VERSION, Hello

    return Hello(
        *(
            VERSION,
            VERSION,
            client,
            os.getpid(),
            metadata.worker_id,
            metadata.model_name,
            metadata.layout_fingerprint(),
        ),
        *(
            (*CAPABILITIES, *([ON_DEVICE] if torch.cuda.is_available() else [])),
            metadata.world_size,
        ),
    )


def _describing(
    config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, groups: tuple[str, ...]
) -> Callable[[str], Describe]:
    """Return what tells, once the salt is known, how this engine names chunks."""

    def describe(salt: str) -> Describe:
        from lmcache_core.sidecar.messages import Describe

        root = identity_root(metadata, salt)
        return Describe(
            metadata.fmt, metadata.model_name, metadata.world_size, config.chunk_size, root, groups
        )

    return describe
