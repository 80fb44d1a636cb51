"""Counts what a served store is asked for, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Result
from lmcache_core.storage.client_view import ClientView, WrappedStore
from lmcache_core.telemetry import Counters
from lmcache_core.wire import ServedStore
from lmcache_core.wire.capabilities import Accepts

from lmcache_storage import metrics


class CountedStore(WrappedStore):
    """A `ServedStore` around another one.

    Args:
        store: Does the work.
        counters: Where it is counted, under the names of `lmcache_storage.metrics`.
    """

    def __init__(self, store: ServedStore, counters: Counters) -> None:
        super().__init__(store)
        self._counters = counters

    @property
    def uncounted(self) -> ServedStore:
        """The same chunks for whoever looks at them and sends them to nobody."""
        return self._store

    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        """See `ServedStore.allocate`."""
        memory = self._store.allocate(num_bytes, tenant)
        if memory is None:
            self._counters.add(metrics.REFUSED_CHUNKS_TOTAL)
        return memory

    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """See `ServedStore.get`."""
        results = await self._store.get(keys)
        for result in results:
            if isinstance(result, Chunk):
                self._counters.add(metrics.SERVED_CHUNKS_TOTAL, label=result.tier)
                self._counters.add(metrics.SERVED_BYTES_TOTAL, result.num_bytes, label=result.tier)
            else:
                self._counters.add(metrics.MISSED_CHUNKS_TOTAL, label=result.reason)
        return results

    async def put(self, chunk: Chunk) -> bool:
        """See `ServedStore.put`."""
        is_kept = await self._store.put(chunk)
        if is_kept:
            self._counters.add(metrics.STORED_CHUNKS_TOTAL)
            self._counters.add(metrics.STORED_BYTES_TOTAL, chunk.num_bytes)
        else:
            self._counters.add(metrics.REFUSED_CHUNKS_TOTAL)
        return is_kept

    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `ServedStore.remove`."""
        num_removed = await self._store.remove(keys)
        self._counters.add(metrics.REMOVED_CHUNKS_TOTAL, num_removed)
        return num_removed


class CountedDoor(CountedStore):
    """A `ClientView`, counted; it `AdaptsToClients` too.

    Args:
        door: Gives each client what it can take.
        counters: As of `CountedStore`.
    """

    def __init__(self, door: ClientView, counters: Counters) -> None:
        super().__init__(door, counters)
        self._door = door

    @property
    def offers(self) -> Accepts:
        """See `AdaptsToClients.offers`."""
        return self._door.offers

    def for_client(self, accepts: Accepts) -> ServedStore:
        """See `AdaptsToClients.for_client`."""
        return CountedStore(self._door.for_client(accepts), self._counters)
