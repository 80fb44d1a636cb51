"""Chooses, once, what stands behind the engine: embedded tiers or the pod's sidecar."""

from __future__ import annotations

import os
from pathlib import Path

from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine.chunk_store import ChunkStore
from lmcache_core.errors import ConfigError
from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.telemetry import Counters
from lmcache_core.token_database import identity_root


def create_chunk_store(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    memory_allocator: MemoryAllocatorInterface | None,
    counters: Counters,
    workers: Workers | None = None,
) -> ChunkStore:
    """The chunk store that the config names; not opened.

    Raises:
        ConfigError: Embedded mode without an allocator.
    """
    if config.sidecar_socket is not None:
        return _sidecar_store(Path(config.sidecar_socket), config, metadata, counters, workers)
    if memory_allocator is None:
        raise ConfigError("memory_allocator=None: embedded mode needs host memory for chunks (or set sidecar_socket)")
    from lmcache_core.storage.manager import StorageManager

    return StorageManager(config, memory_allocator, counters, workers)


def _sidecar_store(
    path: Path, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, counters: Counters, workers: Workers | None
) -> ChunkStore:
    from lmcache_core.sidecar import SidecarChunkStore
    from lmcache_core.sidecar.messages import CAPABILITIES, VERSION, Describe, Hello

    hello = Hello(
        *(VERSION, VERSION, "engine", os.getpid(), metadata.worker_id, metadata.model_name, metadata.layout_fingerprint()),
        *(CAPABILITIES, metadata.world_size),
    )

    def describe(salt: str) -> Describe:
        root = identity_root(metadata, salt)
        return Describe(metadata.fmt, metadata.model_name, metadata.world_size, config.chunk_size, root, ("",))

    return SidecarChunkStore(path, hello, config.tier_timeout_s, counters, workers, describe)
