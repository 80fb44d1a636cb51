"""What this server serves over REST and lm://: counted, and open to handovers from servers that
shut down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Result
from lmcache_core.storage import DiskBackend
from lmcache_core.storage.served import LocalStore, LosslessStore, WrappedStore
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.served import AdaptsToClients, ServedStore, TakesHandovers
from typing_extensions import override

from lmcache_storage import metrics

MAX_PENDING_SHARE = 4
"""While more than one part in this many of the memory waits to be written to the disk, handovers
wait: those chunks are on no disk yet.
"""
MAX_WAIT_S = 5.0
PAUSE_S = 0.01
MAX_REMOVAL_WAIT_S = 5.0
"""Longest time that a store waits for the removal of the same chunk; then the store fails."""


class Departures:
    """Chunks that have moved to another server and are about to be dropped. Clients are still
    served them; other servers, which may shut down, are told that they are gone. For one event
    loop.

    A chunk that is stored here again, for example by a server that shuts down, stays.
    """

    def __init__(self) -> None:
        self._keys: set[ChunkKey] = set()
        self._removals: dict[ChunkKey, asyncio.Event] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._keys or key in self._removals

    def begin(self, keys: Iterable[ChunkKey]) -> None:
        """Mark these chunks as departing. Call it before they are sent: a receiver may shut down
        right away and ask whether its chunks are here.
        """
        self._keys.update(keys)

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """Keep these chunks after all."""
        self._keys.difference_update(keys)

    async def forget(self, keys: Sequence[ChunkKey], remove: Awaitable[object]) -> None:
        """Remove departing chunks. A store of such a chunk waits until the removal has ended, which
        would otherwise remove it, too.

        Args:
            keys: All of them depart, and none is stored before `remove` runs.
        """
        removed = asyncio.Event()
        self.end(keys)
        self._removals.update(dict.fromkeys(keys, removed))
        try:
            await remove
        finally:
            for key in keys:
                del self._removals[key]
            removed.set()

    async def stay(self, key: ChunkKey) -> bool:
        """Prepare to store a chunk, so that it stays; False if it cannot be stored now."""
        self.end([key])
        try:
            async with asyncio.timeout(MAX_REMOVAL_WAIT_S):
                while (removal := self._removals.get(key)) is not None:
                    await removal.wait()
        except TimeoutError:
            return False
        return True


class CountedStore(WrappedStore):
    """A store as seen by its clients: what they do is counted.

    Args:
        counters: Counters, under the names of `lmcache_storage.metrics`.
    """

    def __init__(self, store: ServedStore, counters: Counters) -> None:
        super().__init__(store)
        self._counters = counters

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


class StorageStore(LocalStore, AdaptsToClients, TakesHandovers):
    """All chunks of this server, for clients (`for_client`) and for other servers that hand over
    theirs. A chunk that is put here does not depart.

    Args:
        counters: Counters of what clients and other servers do, under the names of
            `lmcache_storage.metrics`.

    Attributes:
        lossless: The chunks as seen by clients that accept only lossless records.
        num_received: Chunks received so far.
    """

    def __init__(
        self,
        stack: TierStack,
        disk: DiskBackend | None,
        departures: Departures,
        takes_chunks: Callable[[], bool],
        timeout_s: float,
        counters: Counters,
    ) -> None:
        super().__init__(stack, takes_chunks, timeout_s, tiers=None)
        self._disk = disk
        self._counters = counters
        self.lossless = LosslessStore(self)
        self._counted = CountedStore(self, counters)
        self._counted_lossless = CountedStore(self.lossless, counters)
        self._max_pending_bytes = stack.hot.stats()["capacity_bytes"] // MAX_PENDING_SHARE
        self.departures = departures
        self.num_received = 0

    @override
    def for_client(self, accepts: Accepts) -> ServedStore:
        return self._counted if accepts.lossy else self._counted_lossless

    @override
    async def put(self, chunk: Chunk) -> bool:
        return await self.departures.stay(chunk.key) and await super().put(chunk)

    @override
    def stays(self, key: ChunkKey) -> bool:
        return self._accepts_puts() and key not in self.departures

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
        is_kept = await self._counted.put(chunk)
        self.num_received += is_kept
        self._counters.add(metrics.RECEIVED_CHUNKS_TOTAL, is_kept)
        self._counters.add(metrics.RECEIVED_BYTES_TOTAL, chunk.num_bytes * is_kept)
        return is_kept
