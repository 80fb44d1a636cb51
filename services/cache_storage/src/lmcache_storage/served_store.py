"""What this server serves to others over REST and lm://: counted, and open to handovers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Result
from lmcache_core.storage import DiskBackend
from lmcache_core.storage.served import ClientView, WrappedStore
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters
from lmcache_core.wire import AdaptsToClients, ServedStore
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.served import TakesHandovers
from typing_extensions import override

from lmcache_storage import metrics
from lmcache_storage.handover.departures import Departures

MAX_PENDING_SHARE = 4
"""While more than one part in this many of the memory waits to be written to the disk, what is
handed over waits: no disk has it.
"""
MAX_WAIT_S = 5.0
PAUSE_S = 0.01


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
        """The same chunks, for a look at them that sends them to no client."""
        return self._store

    @override
    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        memory = self._store.allocate(num_bytes, tenant)
        if memory is None:
            self._counters.add(metrics.REFUSED_CHUNKS_TOTAL)
        return memory

    @override
    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        results = await self._store.get(keys)
        for result in results:
            if isinstance(result, Chunk):
                self._counters.add(metrics.SERVED_CHUNKS_TOTAL, label=result.tier)
                self._counters.add(metrics.SERVED_BYTES_TOTAL, result.num_bytes, label=result.tier)
            else:
                self._counters.add(metrics.MISSED_CHUNKS_TOTAL, label=result.reason)
        return results

    @override
    async def put(self, chunk: Chunk) -> bool:
        is_kept = await self._store.put(chunk)
        if is_kept:
            self._counters.add(metrics.STORED_CHUNKS_TOTAL)
            self._counters.add(metrics.STORED_BYTES_TOTAL, chunk.num_bytes)
        else:
            self._counters.add(metrics.REFUSED_CHUNKS_TOTAL)
        return is_kept

    @override
    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        num_removed = await self._store.remove(keys)
        self._counters.add(metrics.REMOVED_CHUNKS_TOTAL, num_removed)
        return num_removed


class HandoverStore(CountedStore, AdaptsToClients, TakesHandovers):
    """All chunks of this server, for clients and for other servers that hand over theirs.

    Args:
        view: Gives each client what it can take.
        counters: As of `CountedStore`.
        stack: Where chunks are kept.
        disk: The disk tier of the stack; None without one.
        departures: Chunks that are about to be forgotten.
        takes_chunks: Whether this server takes chunks still.

    Attributes:
        departures: As given.
        num_received: Chunks that have been taken over so far.
    """

    def __init__(
        self,
        view: ClientView,
        counters: Counters,
        stack: TierStack,
        disk: DiskBackend | None,
        departures: Departures,
        takes_chunks: Callable[[], bool],
    ) -> None:
        super().__init__(view, counters)
        self._view = view
        self._stack = stack
        self._disk = disk
        self._takes_chunks = takes_chunks
        self._max_pending_bytes = stack.hot.stats()["capacity_bytes"] // MAX_PENDING_SHARE
        self.departures = departures
        self.num_received = 0

    @property
    @override
    def offers(self) -> Accepts:
        return self._view.offers

    @override
    def for_client(self, accepts: Accepts) -> ServedStore:
        return CountedStore(self._view.for_client(accepts), self._counters)

    @override
    def stays(self, key: ChunkKey) -> bool:
        return self._takes_chunks() and key not in self.departures

    @override
    def has_room(self, num_bytes: int) -> bool:
        if self._disk is not None:
            figures = self._disk.stats()
            used_bytes = figures["used_bytes"] + self._stack.num_pending_bytes
        else:
            figures = self._stack.hot.stats()
            used_bytes = figures["arena_used_bytes"]
        return used_bytes + num_bytes <= figures["capacity_bytes"]

    @override
    async def take_over(self, chunk: Chunk) -> bool:
        deadline = asyncio.get_running_loop().time() + MAX_WAIT_S
        while self._stack.num_pending_bytes > self._max_pending_bytes:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(PAUSE_S)
        is_kept = await self.put(chunk)
        self.num_received += is_kept
        self._counters.add(metrics.RECEIVED_CHUNKS_TOTAL, is_kept)
        self._counters.add(metrics.RECEIVED_BYTES_TOTAL, chunk.num_bytes * is_kept)
        return is_kept
