"""The chunk store behind a connector: the pod's sidecar, or tiers inside vLLM that both of its
sides share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine import ChunkStore
from lmcache_core.engine.stores import SidecarClient, create_chunk_store
from lmcache_core.telemetry import Counters

BYTES_PER_GB = 1 << 30
OnSalt = Callable[[str], None]


class OpenStore:
    """A chunk store that is open, for one side of one engine.

    Args:
        store: The store.
        close: What closes it.
        is_alone: No other side of the engine uses it in this process, though it is inside vLLM.
    """

    def __init__(
        self, store: ChunkStore, close: Callable[[], None], is_alone: bool = False
    ) -> None:
        self.store = store
        self.is_alone = is_alone
        self._close = close

    def close(self) -> None:
        """Give it up. Idempotent."""
        close, self._close = self._close, lambda: None
        close()


def open_store(
    engine_id: str,
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    groups: tuple[str, ...],
    counters: Counters,
    on_salt: OnSalt,
    loads_beside: bool = False,
) -> OpenStore:
    """Open what the config names; a sidecar that is away is not an error.

    Args:
        engine_id: vLLM's name of the engine; tiers inside vLLM are shared by the sides of one
            engine in one process.
        config: Options.
        metadata: What the KV is.
        groups: Names of the cache groups in keys; none for a side that does not name chunks.
        counters: Where misses are counted.
        on_salt: Called with the tenant's salt, then and later.
        loads_beside: Whether this side loads beside the engine's steps, in which it stores.
    """
    if config.sidecar_socket is None:
        return _EmbeddedStores.open(engine_id, config, metadata, counters, on_salt)
    workers = Workers("lmcache-digest")
    client = SidecarClient(f"vllm/{engine_id}", groups, loads_beside)
    store = create_chunk_store(config, metadata, None, counters, workers, client)
    store.open(on_salt)
    return OpenStore(store, store.close)


class _EmbeddedStores:
    """Stores of this process, by engine and options: the scheduler's side looks up what the
    worker's side has stored.

    Two connectors of one engine (in a `MultiConnector`) share one where their options are the same.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _stores: ClassVar[dict[tuple[str, LMCacheEngineConfig], tuple[ChunkStore, int]]] = {}

    @classmethod
    def open(
        cls,
        engine_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        counters: Counters,
        on_salt: OnSalt,
    ) -> OpenStore:
        name = engine_id, config
        with cls._lock:
            store, num_users = cls._stores.get(name, (None, 0))
            if store is None:
                from lmcache_core.memory import PinMemoryAllocator

                allocator = PinMemoryAllocator(int(config.max_local_cpu_size * BYTES_PER_GB))
                store = create_chunk_store(config, metadata, allocator, counters)
                store.open(lambda salt: None)
            cls._stores[name] = (store, num_users + 1)
        on_salt(config.salt)
        return OpenStore(store, lambda: cls._close(name), is_alone=num_users == 0)

    @classmethod
    def _close(cls, name: tuple[str, LMCacheEngineConfig]) -> None:
        with cls._lock:
            store, num_users = cls._stores[name]
            if num_users > 1:
                cls._stores[name] = (store, num_users - 1)
                return
            del cls._stores[name]
        store.close()
