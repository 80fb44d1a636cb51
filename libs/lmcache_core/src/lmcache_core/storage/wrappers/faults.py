"""A tier that fails on purpose, from a seed, so that what fails once fails again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.wrappers.base import WrapperBackend


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong and how often; shares are probabilities, 0 to 1.

    Attributes:
        seed: Decides when.
        delayed_calls: Share of calls that take longer.
        delay_s: By how much at most.
        failed_calls: Share of calls that end with `UnavailableError`, half of them after the tier
            has done its work.
        lost_chunks: Share of chunks that a get does not find, and that a put claims to have kept
            and has not.
        damaged_chunks: Share of chunks that are kept with one bit flipped. The tier's own check
            must find it when it reads them.
    """

    seed: int
    delayed_calls: float = 0.0
    delay_s: float = 0.0
    failed_calls: float = 0.0
    lost_chunks: float = 0.0
    damaged_chunks: float = 0.0


class FaultyBackend(WrapperBackend):
    """Does to a tier what disks and networks do. What happens depends on the seed and on the order
    of the calls alone.

    Args:
        backend: What is wrapped.
        plan: What goes wrong.
    """

    def __init__(self, backend: StorageBackend, plan: FaultPlan) -> None:
        super().__init__(backend)
        self._plan = plan
        self._random = random.Random(plan.seed)  # noqa: S311 (faults, not secrets)
        self._num_faults = 0

    def __repr__(self) -> str:
        return f"FaultyBackend({self._backend!r}, {self._plan!r})"

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        fails_late = await self._before()
        found = await self._backend.batched_contains(keys)
        self._fail(fails_late)
        return found

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """See `StorageBackend.batched_get`."""
        lost = self._draw(len(keys), self._plan.lost_chunks)
        fails_late = await self._before()
        results = await self._backend.batched_get(keys, allocate, timeout_s)
        for i, result in enumerate(results):
            if isinstance(result, Chunk) and (lost[i] or fails_late):
                result.release()
                results[i] = Miss(MissReason.NEVER_STORED)
        self._fail(fails_late)
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        lost = self._draw(len(chunks), self._plan.lost_chunks)
        damaged = self._draw(len(chunks), self._plan.damaged_chunks)
        given = [
            self._damaged(chunk) if is_damaged else chunk
            for chunk, is_lost, is_damaged in zip(chunks, lost, damaged, strict=True)
            if not is_lost
        ]
        fails_late = await self._before()
        kept = iter(await self._backend.batched_put(given))
        self._fail(fails_late)
        return [is_lost or next(kept) for is_lost in lost]

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        fails_late = await self._before()
        num_removed = await self._backend.batched_remove(keys)
        self._fail(fails_late)
        return num_removed

    def stats(self) -> dict[str, int]:
        """The backend's figures, and `injected_faults`."""
        return self._backend.stats() | {"injected_faults": self._num_faults}

    async def _before(self) -> bool:
        """Be late or fail, if it is this call's turn; whether the call is to fail when it is
        done.
        """
        plan = self._plan
        [is_delayed] = self._draw(1, plan.delayed_calls)
        [fails] = self._draw(1, plan.failed_calls)
        fails_late = fails and self._random.random() < 0.5
        if is_delayed:
            await asyncio.sleep(plan.delay_s * self._random.random())
        self._fail(fails and not fails_late)
        return fails_late

    def _fail(self, is_due: bool) -> None:
        if is_due:
            raise UnavailableError(f"injected: {self!r}")

    def _draw(self, num: int, share: float) -> list[bool]:
        drawn = [self._random.random() < share for _ in range(num)]
        self._num_faults += sum(drawn)
        return drawn

    def _damaged(self, chunk: Chunk) -> Chunk:
        """The same record with one bit of its payload flipped, in memory of its own: the
        caller's stays whole.
        """
        payload = bytearray(chunk.sealed().memory.byte_array)
        if payload:
            payload[self._random.randrange(len(payload))] ^= 1 << self._random.randrange(8)
        return chunk.moved(BytesBufferMemoryObj(payload), chunk.tier)
