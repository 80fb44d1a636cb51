"""Moves chunks to their homes after servers have joined or left, slowly and in the background."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.storage.pin_board import PinBoard
from lmcache_core.storage.remote.rendezvous import home
from lmcache_core.storage.stack import LOCAL_TIERS, TierStack
from lmcache_node.drain import MoveProgress
from lmcache_node.local_chunks import LocalChunks

from lmcache_storage.handover.mover import Mover, Sized
from lmcache_storage.handover.servers import OtherServers
from lmcache_storage.served_store import StorageStore

logger = logging.getLogger(__name__)

LOOK_S = 1.0
CHUNKS_A_TURN = 256
STEADY_LOOKS = 3
"""Consecutive checks that must find the same servers before chunks move."""
WINDOW_CHUNKS = 16
FORGET_AFTER_S = 5.0
"""How long moved chunks are still served here: a reader may have asked at the new home before they
arrived.
"""

Situation = tuple[frozenset[str], int]


class Rebalancer:
    """Moves chunks whose home is another server to that server, if it has room, and drops them
    here.

    After each window it rests for as long as the window took.

    Args:
        stack: The tiers to drop them from.
        store: Receives chunks from others, which may see another set of servers; informed of
            departing chunks.
        pinned: Chunks that stay here regardless.
        takes_chunks: Whether this server stays; a draining one hands over everything anyway.
    """

    def __init__(
        self,
        chunks: LocalChunks,
        stack: TierStack,
        servers: OtherServers,
        mover: Mover,
        store: StorageStore,
        pinned: PinBoard,
        takes_chunks: Callable[[], bool],
    ) -> None:
        self._chunks = chunks
        self._stack = stack
        self._servers = servers
        self._mover = mover
        self._takes_chunks = takes_chunks
        self._store = store
        self._pinned = pinned
        self._settled: Situation = (frozenset(), 0)
        self._seen = self._settled
        self._num_looks = 0
        self._moved: deque[tuple[float, Sequence[ChunkKey]]] = deque()

    async def look(self) -> None:
        """Move misplaced chunks, if servers have joined or left since the last time and the set is
        stable now.
        """
        known = self._servers.known()
        await self._forget(known)
        now = (known, self._store.num_received)
        self._num_looks = self._num_looks + 1 if now == self._seen else 0
        self._seen = now
        if now == self._settled or self._num_looks < STEADY_LOOKS or not self._takes_chunks():
            return
        strangers = await self._strangers(known)
        moved = MoveProgress(len(strangers))
        for begin in range(0, len(strangers), WINDOW_CHUNKS):
            if not self._takes_chunks() or self._servers.known() != known:
                return
            await self._move(strangers[begin : begin + WINDOW_CHUNKS], moved)
        self._settled = now
        if moved.total:
            logger.info(
                "rebalanced: moved_chunks=%d chunks=%d",
                moved.handed_over + moved.already_elsewhere,
                moved.total,
            )

    async def _move(self, window: Sequence[Sized], moved: MoveProgress) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        departures, keys = self._store.departures, {key for key, _ in window}
        departures.begin(keys)
        settled: Sequence[ChunkKey] = ()
        try:
            settled = await self._mover.move_home(window, moved)
        finally:
            departures.end(keys.difference(settled))
        if settled:
            self._moved.append((now() + FORGET_AFTER_S, settled))
        await asyncio.sleep(now() - began)

    async def _forget(self, known: frozenset[str]) -> None:
        """Drop chunks that moved a while ago, except those that must stay: their home is here again
        or has lost them, or they were stored here again.
        """
        departures = self._store.departures
        while (
            self._takes_chunks()
            and self._moved
            and self._moved[0][0] <= asyncio.get_running_loop().time()
        ):
            _, keys = self._moved.popleft()
            there = await self._mover.still_home(
                [key for key in keys if key in departures and not self._stays(key, known)]
            )
            # Meanwhile they may have been stored here again, or pinned.
            gone = [key for key in there if key in departures and not self._stays(key, known)]
            await departures.forget(gone, self._stack.batched_remove(gone, LOCAL_TIERS))
            departures.end(keys)

    def _stays(self, key: ChunkKey, known: frozenset[str]) -> bool:
        return (
            key in self._pinned
            or home([*known, self._servers.instance], key.key.chunk_id()) == self._servers.instance
        )

    async def _strangers(self, known: frozenset[str]) -> list[Sized]:
        found: list[Sized] = []
        for i, chunk in enumerate(await asyncio.to_thread(self._chunks.hottest_first)):
            if not self._stays(chunk[0], known):
                found.append(chunk)
            if i % CHUNKS_A_TURN == 0:
                await asyncio.sleep(0)
        return found
