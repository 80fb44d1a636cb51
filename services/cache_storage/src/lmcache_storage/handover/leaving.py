"""Chunks that have been given to other servers, until they are forgotten here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.storage.client_view import WrappedStore
from lmcache_core.wire import ServedStore

MAX_REMOVAL_WAIT_S = 5.0
"""Longest that a chunk waits to be stored anew because it is just being forgotten; it is not
stored then.
"""


class Leaving:
    """Chunks that leave: clients are served them for a while yet, but to other servers, which may
    end, they are gone. On one event loop.

    One that is stored here meanwhile, for instance by a server that ends and gives it back, does
    not leave.
    """

    def __init__(self) -> None:
        self._keys: set[ChunkKey] = set()
        self._removals: dict[ChunkKey, asyncio.Event] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._keys or key in self._removals

    def begin(self, keys: Iterable[ChunkKey]) -> None:
        """These leave: to be called before they are sent, since who takes one may end at once
        and ask whether it is here.
        """
        self._keys.update(keys)

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """These stay after all."""
        self._keys.difference_update(keys)

    async def forget(self, keys: Sequence[ChunkKey], remove: Awaitable[object]) -> None:
        """Remove chunks that leave. None of them may be stored before that is over: it would be
        removed too.

        Args:
            keys: All of them leave, and none is stored before `remove` runs.
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
        """This one is about to be stored, and stays then; False: it cannot be stored now."""
        self.end([key])
        try:
            async with asyncio.timeout(MAX_REMOVAL_WAIT_S):
                while (removal := self._removals.get(key)) is not None:
                    await removal.wait()
        except TimeoutError:
            return False
        return True


class StayingStore(WrappedStore):
    """A store in which stays what is put there.

    Args:
        store: What is wrapped.
        leaving: What leaves it.
    """

    def __init__(self, store: ServedStore, leaving: Leaving) -> None:
        super().__init__(store)
        self._leaving = leaving

    async def put(self, chunk: Chunk) -> bool:
        """See `ServedStore.put`."""
        return await self._leaving.stay(chunk.key) and await self._store.put(chunk)
