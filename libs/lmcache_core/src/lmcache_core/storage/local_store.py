"""What a process serves to others over lm://: the chunks of its own tiers, by default never
those of its peers or of its remote tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Result
from lmcache_core.storage.stack import DEFAULT_TIMEOUT_S, TierStack

LOCAL_TIERS = ("Hot", "LocalDiskBackend")


class LocalStore:
    """A `lmcache_core.wire.ServedStore` over the local tiers of a stack, or those that are named.

    Args:
        stack: The tiers.
        accepts_puts: Asked at every PUT and its allocation: False while draining, or always for a
            read-only store.
        timeout_s: Longest wait on slower tiers for one request.
        tiers: Names of the tiers that are served; None: all.
    """

    def __init__(
        self,
        stack: TierStack,
        accepts_puts: Callable[[], bool],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tiers: Sequence[str] | None = LOCAL_TIERS,
    ) -> None:
        self._stack = stack
        self._tiers = tiers
        self._accepts_puts = accepts_puts
        self._timeout_s = timeout_s

    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        """See `ServedStore.allocate`."""
        return self._stack.receive(num_bytes, tenant) if self._accepts_puts() else None

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `ServedStore.contains`."""
        return [
            tier is not None
            for tier in await self._stack.batched_tiers(keys, self._timeout_s, self._tiers)
        ]

    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """See `ServedStore.get`."""
        return await self._stack.batched_get(keys, self._timeout_s, search_range=self._tiers)

    async def put(self, chunk: Chunk) -> bool:
        """See `ServedStore.put`."""
        if not self._accepts_puts():
            return False
        (is_kept,) = await self._stack.batched_put([chunk])
        return is_kept

    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `ServedStore.remove`."""
        return await self._stack.batched_remove(keys, self._tiers)
