"""What wrappers have in common: they forward everything, and each overrides what it adds."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import ListsKeys, StorageBackend


class WrapperBackend(StorageBackend):
    """A tier that stands before another one, under its name.

    Args:
        backend: What is wrapped; opened and closed with this one.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.name = backend.name
        self._backend = backend

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend!r})"

    @property
    def wrapped(self) -> StorageBackend:
        """The tier behind this one."""
        return self._backend

    async def open(self) -> None:
        """See `StorageBackend.open`."""
        await self._backend.open()

    async def close(self) -> None:
        """See `StorageBackend.close`."""
        await self._backend.close()

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        return await self._backend.batched_contains(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """See `StorageBackend.batched_get`."""
        return await self._backend.batched_get(keys, allocate, timeout_s)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        return await self._backend.batched_put(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        return await self._backend.batched_remove(keys)

    async def clear(self, tenant: str | None = None) -> int:
        """See `StorageBackend.clear`."""
        return await self._backend.clear(tenant)

    def stats(self) -> dict[str, int]:
        """See `StorageBackend.stats`."""
        return self._backend.stats()


def lister_of(backend: StorageBackend) -> ListsKeys | None:
    """Who can tell what this tier holds: the tier itself or the one inside its wrappers. None
    when it does not know.
    """
    while isinstance(backend, WrapperBackend):
        backend = backend.wrapped
    return backend if isinstance(backend, ListsKeys) else None
