"""Served stores that give each client what it can take."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.unusable import UnusableRecords
from lmcache_core.wire import ServedStore
from lmcache_core.wire.capabilities import Accepts


class WrappedStore:
    """A `ServedStore` that stands before another one and forwards everything.

    Args:
        store: What is wrapped.
    """

    def __init__(self, store: ServedStore) -> None:
        self._store = store

    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        """See `ServedStore.allocate`."""
        return self._store.allocate(num_bytes, tenant)

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `ServedStore.contains`."""
        return await self._store.contains(keys)

    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """See `ServedStore.get`."""
        return await self._store.get(keys)

    async def put(self, chunk: Chunk) -> bool:
        """See `ServedStore.put`."""
        return await self._store.put(chunk)

    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `ServedStore.remove`."""
        return await self._store.remove(keys)


class LosslessStore(WrappedStore):
    """A store as clients see it that take nothing lossy: a lossy record is a miss, is not there,
    and gives place to a lossless one.

    Args:
        store: What is wrapped.
    """

    def __init__(self, store: ServedStore) -> None:
        super().__init__(store)
        self._in_the_way = UnusableRecords()

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `ServedStore.contains`; that a record is lossy is known when it has been asked
        for.
        """
        found = await self._store.contains(keys)
        return [
            is_there and key not in self._in_the_way
            for key, is_there in zip(keys, found, strict=True)
        ]

    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """See `ServedStore.get`."""
        return [self._let_out(result) for result in await self._store.get(keys)]

    async def put(self, chunk: Chunk) -> bool:
        """See `ServedStore.put`."""
        if chunk.key in self._in_the_way and not chunk.lossy:
            await self._store.remove(
                [chunk.key]
            )  # from every tier: those that write later would keep the record that they have
            self._in_the_way.forget([chunk.key])
        return await self._store.put(chunk)

    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `ServedStore.remove`."""
        num_removed = await self._store.remove(keys)
        self._in_the_way.forget(keys)
        return num_removed

    def _let_out(self, result: Result) -> Result:
        if isinstance(result, Miss):
            return result
        if not result.lossy:
            self._in_the_way.forget([result.key])
            return result
        self._in_the_way.note(result.key)
        result.release()
        return Miss(MissReason.ENCODING)


class ClientView(WrappedStore):
    """A store that holds records as they come, and `AdaptsToClients`.

    Args:
        store: What is wrapped.
    """

    def __init__(self, store: ServedStore) -> None:
        super().__init__(store)
        self._lossless = LosslessStore(store)

    @property
    def offers(self) -> Accepts:
        """See `AdaptsToClients.offers`."""
        return Accepts(lossy=True)

    def for_client(self, accepts: Accepts) -> ServedStore:
        """See `AdaptsToClients.for_client`."""
        return self._store if accepts.lossy else self._lossless
