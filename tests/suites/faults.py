"""Tiers for tests: one that forwards everything, and one that fails on purpose, from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core._typing import override
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend


class ForwardingBackend(StorageBackend):
    """A tier around another one, under its name, for tests to override.

    Args:
        backend: Opened and closed with this one.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.name = backend.name
        self.wrapped = backend
        self._backend = backend

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend!r})"

    @property
    @override
    def is_bypassed(self) -> bool:
        return self._backend.is_bypassed

    @override
    def num_worth(self, num_chunks: int, limit_s: float, recompute_s: float | None = None) -> int:
        return self._backend.num_worth(num_chunks, limit_s, recompute_s)

    @override
    async def open(self) -> None:
        await self._backend.open()

    @override
    async def close(self) -> None:
        await self._backend.close()

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._backend.batched_contains(keys)

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        return await self._backend.batched_get(keys, allocate, timeout_s)

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        return await self._backend.batched_put(chunks)

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        return await self._backend.batched_remove(keys)

    @override
    async def clear(self, tenant: str | None = None) -> int:
        return await self._backend.clear(tenant)

    @override
    def stats(self) -> dict[str, int]:
        return self._backend.stats()


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


class FaultyBackend(ForwardingBackend):
    """Does to a tier what disks and networks do. What happens depends on the seed and on the order
    of the calls alone.

    Args:
        backend: The tier.
        plan: What goes wrong.
    """

    def __init__(self, backend: StorageBackend, plan: FaultPlan) -> None:
        super().__init__(backend)
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._num_faults = 0

    def __repr__(self) -> str:
        return f"FaultyBackend({self._backend!r}, {self._plan!r})"

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        fails_late = await self._before()
        found = await self._backend.batched_contains(keys)
        self._fail(fails_late)
        return found

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        lost = self._draw(len(keys), self._plan.lost_chunks)
        fails_late = await self._before()
        results = await self._backend.batched_get(keys, allocate, timeout_s)
        for i, result in enumerate(results):
            if isinstance(result, Chunk) and (lost[i] or fails_late):
                result.release()
                results[i] = Miss(MissReason.NEVER_STORED)
        self._fail(fails_late)
        return results

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
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

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        fails_late = await self._before()
        num_removed = await self._backend.batched_remove(keys)
        self._fail(fails_late)
        return num_removed

    @override
    def stats(self) -> dict[str, int]:
        """Return the tier's figures, and `injected_faults`."""
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
            await asyncio.sleep(plan.delay_s * self._random.random())  # real time: a slow tier
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
