"""Hands chunks to the remote tier."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.storage.base import StorageBackend


class RemoteSource:
    """The remote tier as the only taker.

    Args:
        tier: It, encoding, without a breaker: a drain must know a tier that is away from one that
            refuses.
    """

    def __init__(self, tier: StorageBackend) -> None:
        self._tier = tier

    @property
    def name(self) -> str:
        """See `Taker.name`."""
        return self._tier.name

    async def takers(self) -> Sequence[RemoteSource]:
        """See `TakerSource.takers`."""
        return [self]

    async def has(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `Taker.has`."""
        return await self._tier.batched_contains(keys)

    async def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `Taker.put`."""
        return await self._tier.batched_put(chunks)

    async def close(self) -> None:
        """Nothing to do: the tier belongs to the stack."""
