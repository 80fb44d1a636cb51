"""A tier that fails on purpose."""

from __future__ import annotations

import asyncio

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_core.storage.eviction import create_policy

from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload
from tests.suites.faults import FaultPlan, FaultyBackend


@pytest.fixture
def hot() -> LocalCPUBackend:
    return LocalCPUBackend(ArenaAllocator.anonymous(1 << 20), create_policy())


@pytest.fixture
def arena() -> Arena:
    return Arena()


async def test_the_same_seed_breaks_the_same_calls(hot: LocalCPUBackend) -> None:
    async def history(seed: int) -> list[bool]:
        tier = FaultyBackend(hot, FaultPlan(seed, failed_calls=0.5))
        failed = []
        for _ in range(64):
            [answer] = await asyncio.gather(
                tier.batched_contains([make_key(1)]), return_exceptions=True
            )
            failed.append(isinstance(answer, UnavailableError) and f"seed={seed}" in str(answer))
        return failed

    first = await history(7)
    assert await history(7) == first
    assert await history(8) != first
    assert 10 < sum(first) < 54


async def test_chunks_are_lost_on_both_ways(hot: LocalCPUBackend, arena: Arena) -> None:
    tier = FaultyBackend(hot, FaultPlan(seed=5, lost_chunks=0.5))
    keys = [make_key(i) for i in range(64)]
    assert await tier.batched_put([make_chunk(i) for i in range(64)]) == [True] * 64
    kept = sum(hot.contains_many(keys))
    assert 16 < kept < 48
    got = [result for result in await tier.batched_get(keys, arena) if isinstance(result, Chunk)]
    assert 0 < len(got) < kept
    for chunk in got:
        chunk.release()


async def test_what_was_damaged_on_its_way_is_found_by_the_tier_and_the_caller_keeps_it_whole(
    tmp_path, arena: Arena
) -> None:
    disk = DiskBackend(tmp_path, 1 << 20)
    tier = FaultyBackend(disk, FaultPlan(seed=11, damaged_chunks=1.0))
    await tier.open()
    chunk = make_chunk("a")
    assert await tier.batched_put([chunk, make_chunk("empty", payload=b"")]) == [True, True]
    assert bytes(chunk.memory.byte_array) == make_payload("a")
    got = [
        payload_of(result)
        for result in await tier.batched_get([chunk.key, make_key("empty")], arena)
    ]
    assert got == [MissReason.CORRUPT, b""]
    await tier.close()
