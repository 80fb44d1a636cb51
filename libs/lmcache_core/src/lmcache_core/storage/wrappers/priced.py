"""A tier that knows what its reads cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.cost import ReadCost

PROBE_INTERVAL = 16
"""Of so many reads that look too dear, one is made all the same (within its deadline), or a tier that has recovered would never be seen."""


@runtime_checkable
class KnowsItsPrice(Protocol):
    """Ability: a tier that can say whether a read is worth it."""

    def is_worth(self, num_chunks: int, limit_s: float) -> bool:
        """Whether reading so many chunks should come in below `limit_s`, as far as is known."""


class PricedBackend(StorageBackend):
    """Measures the reads of the backend inside, and says beforehand whether one can be in time.

    Args:
        backend: What is wrapped.
        clock: Seconds, monotonic.
    """

    def __init__(self, backend: StorageBackend, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = backend.name
        self._backend = backend
        self._clock = clock
        self._cost = ReadCost()
        self._num_too_dear = 0

    def is_worth(self, num_chunks: int, limit_s: float) -> bool:
        """See `KnowsItsPrice.is_worth`."""
        expected_s = self._cost.expected_s(num_chunks)
        if expected_s is None or expected_s <= limit_s:
            return True
        self._num_too_dear += 1
        return self._num_too_dear % PROBE_INTERVAL == 0

    async def open(self) -> None:
        """See `StorageBackend.open`."""
        await self._backend.open()

    async def close(self) -> None:
        """See `StorageBackend.close`."""
        await self._backend.close()

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        return await self._backend.batched_contains(keys)

    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None) -> list[Result]:
        """See `StorageBackend.batched_get`. What it brought, and how long that took, is remembered."""
        began = self._clock()
        results = await self._backend.batched_get(keys, allocate, timeout_s)
        arrived = [result for result in results if isinstance(result, Chunk)]
        is_late = any(isinstance(result, Miss) and result.reason is MissReason.DEADLINE for result in results)
        if arrived or is_late:
            self._cost.observe(len(arrived), sum(chunk.num_bytes for chunk in arrived), self._clock() - began)
        return results

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
        """The backend's figures, and how many reads looked too dear."""
        return self._backend.stats() | {"reads_too_dear": self._num_too_dear}
