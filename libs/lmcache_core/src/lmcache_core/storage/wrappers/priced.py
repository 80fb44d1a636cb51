"""A tier that knows what its reads cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.cost import ReadCost
from lmcache_core.storage.wrappers.base import WrapperBackend

PROBE_INTERVAL = 16
"""Of so many reads that look too dear, one is made all the same (within its deadline), or a tier
that has recovered would never be seen.
"""


@runtime_checkable
class KnowsItsPrice(Protocol):
    """Ability: a tier that can say how much of a read is worth it."""

    def num_worth(self, num_chunks: int, limit_s: float, recompute_s: float | None = None) -> int:
        """How many of so many chunks, from the first, a read should bring, as far as is known.

        Args:
            num_chunks: How many are wanted.
            limit_s: The read must be over by then.
            recompute_s: What computing one chunk anew costs; a read that costs more than computing
                what it brings is worth nothing.
        """


class PricedBackend(WrapperBackend):
    """Measures the reads of the backend inside, and says beforehand whether one can be in time.

    Args:
        backend: What is wrapped.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, backend: StorageBackend, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(backend)
        self._clock = clock
        self._cost = ReadCost()
        self._num_too_dear = 0

    def num_worth(self, num_chunks: int, limit_s: float, recompute_s: float | None = None) -> int:
        """See `KnowsItsPrice.num_worth`."""
        num = self._cost.num_within(num_chunks, limit_s)
        if (
            num
            and recompute_s is not None
            and (self._cost.expected_s(num) or 0.0) > num * recompute_s
        ):
            num = 0
        if num == 0 and num_chunks:
            self._num_too_dear += 1
            return num_chunks if self._num_too_dear % PROBE_INTERVAL == 0 else 0
        return num

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """See `StorageBackend.batched_get`. What it brought, and how long that took, is
        remembered.
        """
        began = self._clock()
        try:
            results = await self._backend.batched_get(keys, allocate, timeout_s)
        except asyncio.CancelledError:
            if (
                timeout_s is not None and self._clock() - began >= timeout_s
            ):  # it did not heed its limit
                self._cost.observe(0, 0, self._clock() - began)
            raise
        arrived = [result for result in results if isinstance(result, Chunk)]
        is_late = any(
            isinstance(result, Miss) and result.reason is MissReason.DEADLINE for result in results
        )
        if arrived or is_late:
            self._cost.observe(
                len(arrived), sum(chunk.num_bytes for chunk in arrived), self._clock() - began
            )
        return results

    def stats(self) -> dict[str, int]:
        """The backend's figures, and how many reads looked too dear."""
        return self._backend.stats() | {"reads_too_dear": self._num_too_dear}
