"""Chooses, once, what stands behind the engine: embedded tiers or the pod's sidecar."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine.chunk_store import ChunkStore
from lmcache_core.errors import ConfigError
from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.record import RAW_SERDE
from lmcache_core.telemetry import Counters

logger = logging.getLogger(__name__)


def create_chunk_store(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    memory_allocator: MemoryAllocatorInterface | None,
    counters: Counters,
) -> ChunkStore:
    """The chunk store that the config names; not opened.

    Raises:
        ConfigError: Embedded mode without an allocator.
    """
    for option in ineffective_options(config):
        logger.warning("option %s has no effect here", option)
    if config.sidecar_socket is not None:
        from lmcache_core.sidecar import SidecarChunkStore
        from lmcache_core.sidecar.messages import VERSION, Hello

        hello = Hello(VERSION, VERSION, "engine", os.getpid(), metadata.worker_id, metadata.model_name, metadata.layout_fingerprint())
        return SidecarChunkStore(Path(config.sidecar_socket), hello, config.tier_timeout_s, counters)
    if memory_allocator is None:
        raise ConfigError("memory_allocator=None: embedded mode needs host memory for chunks (or set sidecar_socket)")
    from lmcache_core.storage.manager import StorageManager

    return StorageManager(config, memory_allocator, counters)


def ineffective_options(config: LMCacheEngineConfig) -> list[str]:
    """Options that ask for something that this engine does not do: better said than silently ignored."""
    ignored = [
        f"{name}={value!r}" for name, value in (("enable_p2p", config.enable_p2p), ("save_decode_cache", config.save_decode_cache)) if value
    ]
    if config.remote_url is not None and config.remote_serde not in (None, RAW_SERDE):
        ignored.append(f"remote_serde={config.remote_serde!r}")
    if config.sidecar_socket is not None and config.local_disk is not None:
        ignored.append("local_disk, beside sidecar_socket")
    return ignored
