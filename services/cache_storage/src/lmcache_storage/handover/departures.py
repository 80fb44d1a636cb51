"""Chunks that have been given to other servers, until they are forgotten here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.storage.served import WrappedStore
from lmcache_core.wire import ServedStore
from typing_extensions import override

MAX_REMOVAL_WAIT_S = 5.0
"""Longest that a store waits for the removal of the same chunk; it fails then."""


class Departures:
    """Chunks that have moved to another server and are about to be forgotten. Clients are still
    served them; other servers, which may end, are told that they are gone. On one event loop.

    A chunk that is stored here again, for instance by a server that ends, stays.
    """

    def __init__(self) -> None:
        self._keys: set[ChunkKey] = set()
        self._removals: dict[ChunkKey, asyncio.Event] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._keys or key in self._removals

    def begin(self, keys: Iterable[ChunkKey]) -> None:
        """Count these as departing. Call it before they are sent: a receiver may end at once and
        ask whether its chunks are here.
        """
        self._keys.update(keys)

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """Let these stay after all."""
        self._keys.difference_update(keys)

    async def forget(self, keys: Sequence[ChunkKey], remove: Awaitable[object]) -> None:
        """Remove departing chunks. Storing one of them waits until that is over: it would be
        removed too.

        Args:
            keys: All of them depart, and none is stored before `remove` runs.
            remove: Removes them.
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
        """Prepare for storing a chunk, which stays then; False if it cannot be stored now."""
        self.end([key])
        try:
            async with asyncio.timeout(MAX_REMOVAL_WAIT_S):
                while (removal := self._removals.get(key)) is not None:
                    await removal.wait()
        except TimeoutError:
            return False
        return True


class KeepingStore(WrappedStore):
    """A store in which what is put does not depart.

    Args:
        store: What is wrapped.
        departures: What is about to be forgotten there.
    """

    def __init__(self, store: ServedStore, departures: Departures) -> None:
        super().__init__(store)
        self._departures = departures

    @override
    async def put(self, chunk: Chunk) -> bool:
        return await self._departures.stay(chunk.key) and await self._store.put(chunk)
