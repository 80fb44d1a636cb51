"""The door through which servers that end hand over their chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.storage.client_view import ClientView
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters

from lmcache_storage import metrics
from lmcache_storage.counted_store import CountedDoor
from lmcache_storage.handover.held import HeldChunks
from lmcache_storage.handover.leaving import Leaving

MAX_PENDING_SHARE = 4
"""While more than one part in this many of the memory waits to be written to the disk, what is
handed over waits: it is on no disk else.
"""
MAX_WAIT_S = 5.0
PAUSE_S = 0.01


class HandoverDoor(CountedDoor):
    """A counted door that `TakesHandovers`.

    Args:
        door: As of `CountedDoor`.
        counters: The same.
        chunks: Tells whether there is room.
        stack: Where chunks are kept.
        leaving: What is about to be forgotten.
        is_open: Says whether this server takes chunks still.

    Attributes:
        leaving: As given.
        num_received: Chunks that have been taken over so far.
    """

    def __init__(
        self,
        door: ClientView,
        counters: Counters,
        chunks: HeldChunks,
        stack: TierStack,
        leaving: Leaving,
        is_open: Callable[[], bool],
    ) -> None:
        super().__init__(door, counters)
        self.leaving = leaving
        self._is_open = is_open
        self._chunks = chunks
        self._stack = stack
        self.num_received = 0
        self._max_pending_bytes = stack.hot.stats()["capacity_bytes"] // MAX_PENDING_SHARE

    def stays(self, key: ChunkKey) -> bool:
        """See `TakesHandovers.stays`."""
        return self._is_open() and key not in self.leaving

    def has_room(self, num_bytes: int) -> bool:
        """See `TakesHandovers.has_room`."""
        return self._chunks.has_room(num_bytes, self._stack.num_pending_bytes)

    async def take_over(self, chunk: Chunk) -> bool:
        """See `TakesHandovers.take_over`."""
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
