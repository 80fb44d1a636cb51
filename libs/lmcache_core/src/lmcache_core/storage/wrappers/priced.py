"""A tier that knows what its reads cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.cost import ReadCost
from lmcache_core.storage.wrappers.base import WrapperBackend

PROBE_INTERVAL = 16
"""Of so many reads that look too dear, one is made all the same (within its deadline), or a tier that has recovered would never be seen."""


@runtime_checkable
class KnowsItsPrice(Protocol):
    """Ability: a tier that can say whether a read is worth it."""

    def is_worth(self, num_chunks: int, limit_s: float) -> bool:
        """Whether reading so many chunks should come in below `limit_s`, as far as is known."""


class PricedBackend(WrapperBackend):
    """Measures the reads of the backend inside, and says beforehand whether one can be in time.

    Args:
        backend: What is wrapped.
        clock: Seconds, monotonic.
    """

    def __init__(self, backend: StorageBackend, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(backend)
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

    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None) -> list[Result]:
        """See `StorageBackend.batched_get`. What it brought, and how long that took, is remembered."""
        began = self._clock()
        results = await self._backend.batched_get(keys, allocate, timeout_s)
        arrived = [result for result in results if isinstance(result, Chunk)]
        is_late = any(isinstance(result, Miss) and result.reason is MissReason.DEADLINE for result in results)
        if arrived or is_late:
            self._cost.observe(len(arrived), sum(chunk.num_bytes for chunk in arrived), self._clock() - began)
        return results

    def stats(self) -> dict[str, int]:
        """The backend's figures, and how many reads looked too dear."""
        return self._backend.stats() | {"reads_too_dear": self._num_too_dear}
