"""The chunk store of a connector: the pod's sidecar, or tiers inside vLLM shared by both of its
sides.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine import ChunkStore
from lmcache_core.engine.stores import BYTES_PER_GB, SidecarClient, create_chunk_store
from lmcache_core.telemetry import Counters

_embedded: dict[tuple[str, LMCacheEngineConfig], tuple[ChunkStore, int]] = {}
"""Stores of this process with their number of users, by engine and options: the scheduler's side
looks up what the worker's side has stored. Two connectors of one engine (in a `MultiConnector`)
share one if their options are equal.
"""
_embedded_lock = threading.Lock()


def _enter_child() -> None:
    """Begin without stores in a forked child: it opens its own."""
    global _embedded_lock
    _embedded.clear()
    _embedded_lock = threading.Lock()


os.register_at_fork(after_in_child=_enter_child)


@dataclass
class OpenStore:
    """An open chunk store, for one side of one engine.

    Attributes:
        is_alone: It is inside vLLM, and no other side of the engine uses it in this process.
        closing: Closes it; None once it is closed.
    """

    store: ChunkStore
    is_alone: bool
    closing: Callable[[], None] | None

    def close(self) -> None:
        """Release the store. Idempotent."""
        closing, self.closing = self.closing, None
        if closing is not None:
            closing()


def open_store(
    client: SidecarClient,
    config: LMCacheEngineConfig,
    metadata: LMCacheEngineMetadata,
    counters: Counters,
    on_salt: Callable[[str], None],
) -> OpenStore:
    """Open the store that the config selects; a missing sidecar is not an error.

    Args:
        client: How this side identifies itself to the sidecar; tiers inside vLLM are shared by the
            sides of its engine in one process.
        on_salt: Called with the tenant's salt, now and whenever it changes.
    """
    if config.sidecar_socket is not None:
        workers = Workers("lmcache-digest")
        store = create_chunk_store(config, metadata, None, counters, workers, client)
        store.open(on_salt)
        return OpenStore(store, False, store.close)
    name = client.name, config
    with _embedded_lock:
        shared, num_users = _embedded.get(name, (None, 0))
        if shared is None:
            from lmcache_core.memory import PinMemoryAllocator

            allocator = PinMemoryAllocator(int(config.max_local_cpu_size * BYTES_PER_GB))
            shared = create_chunk_store(config, metadata, allocator, counters, client=client)
            shared.open(lambda salt: None)
        _embedded[name] = shared, num_users + 1
    on_salt(config.salt)
    return OpenStore(shared, num_users == 0, lambda: _close_embedded(name))


def _close_embedded(name: tuple[str, LMCacheEngineConfig]) -> None:
    with _embedded_lock:
        store, num_users = _embedded.pop(name)
        if num_users > 1:
            _embedded[name] = store, num_users - 1
            return
    store.close()
