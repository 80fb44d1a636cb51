"""The documented registry of engines, by instance id."""

from __future__ import annotations

import threading
from typing import ClassVar

from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine.engine import LMCacheEngine
from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.token_database import ChunkedTokenDatabase

BYTES_PER_GB = 1 << 30


class LMCacheEngineBuilder:
    """Makes, finds and destroys engines of this process."""

    _instances: ClassVar[dict[str, LMCacheEngine]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        gpu_connector: GPUConnectorInterface,
    ) -> LMCacheEngine:
        """Return the engine of that id, made and opened if it does not exist.

        Raises:
            ValueError: It exists with another config or metadata.
        """
        with cls._lock:
            engine = cls._instances.get(instance_id)
            if engine is None:
                engine = _build(config, metadata, gpu_connector)
                engine.open()
                cls._instances[instance_id] = engine
            elif (engine.config, engine.metadata) != (config, metadata):
                raise ValueError(
                    f"engine {instance_id!r} exists with another configuration; destroy it first or"
                    " use another id"
                )
            return engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """Return the engine of that id, or None."""
        with cls._lock:
            return cls._instances.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and forget the engine of that id, if there is one."""
        with cls._lock:
            engine = cls._instances.pop(instance_id, None)
        if engine is not None:
            engine.close()


def _build(
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    gpu_connector: GPUConnectorInterface,
) -> LMCacheEngine:
    allocator: MemoryAllocatorInterface | None = None
    if config.sidecar_socket is None:
        from lmcache_core.memory import PinMemoryAllocator

        allocator = PinMemoryAllocator(int(config.max_local_cpu_size * BYTES_PER_GB))
    return LMCacheEngine(
        config, metadata, allocator, ChunkedTokenDatabase(config, metadata), gpu_connector
    )
