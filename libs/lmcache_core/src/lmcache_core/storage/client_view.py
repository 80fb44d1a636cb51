"""Views of a served store that give each client what it can decode."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.unusable import UnusableRecords
from lmcache_core.wire import AdaptsToClients, ServedStore
from lmcache_core.wire.capabilities import Accepts


class WrappedStore(ServedStore):
    """A `ServedStore` around another one that forwards everything.

    Args:
        store: What is wrapped.
    """

    def __init__(self, store: ServedStore) -> None:
        self._store = store

    @override
    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        return self._store.allocate(num_bytes, tenant)

    @override
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._store.contains(keys)

    @override
    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        return await self._store.get(keys)

    @override
    async def put(self, chunk: Chunk) -> bool:
        return await self._store.put(chunk)

    @override
    async def remove(self, keys: Sequence[ChunkKey]) -> int:
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

    @override
    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks a `get` would find now; that a record is lossy is known only once it
        was read.
        """
        found = await self._store.contains(keys)
        return [
            is_there and key not in self._in_the_way
            for key, is_there in zip(keys, found, strict=True)
        ]

    @override
    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        return [self._let_out(result) for result in await self._store.get(keys)]

    @override
    async def put(self, chunk: Chunk) -> bool:
        if chunk.key in self._in_the_way and not chunk.lossy:
            await self._store.remove(
                [chunk.key]
            )  # from every tier: those that write later would keep the record that they have
            self._in_the_way.forget([chunk.key])
        return await self._store.put(chunk)

    @override
    async def remove(self, keys: Sequence[ChunkKey]) -> int:
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


class ClientView(WrappedStore, AdaptsToClients):
    """A store that holds records as they come, and `AdaptsToClients`.

    Args:
        store: What is wrapped.
    """

    def __init__(self, store: ServedStore) -> None:
        super().__init__(store)
        self._lossless = LosslessStore(store)

    @property
    @override
    def offers(self) -> Accepts:
        return Accepts(lossy=True)

    @override
    def for_client(self, accepts: Accepts) -> ServedStore:
        return self._store if accepts.lossy else self._lossless
