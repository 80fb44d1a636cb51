"""Wrappers that log, count and break."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Allocate, Chunk, MissReason, Result
from lmcache_core.storage import DiskBackend, LocalCPUBackend, StorageBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.wrappers import (
    FaultPlan,
    FaultyBackend,
    LoggedBackend,
    MeteredBackend,
    WrapperBackend,
    lister_of,
)
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, TIER_CHUNKS_TOTAL, Counters
from lmcache_core.testing.backend_suite import Arena, payload_of
from lmcache_core.testing.chunks import make_chunk, make_key, make_payload

RECORD_BYTES = 512 + 1000


class Flaky(WrapperBackend):
    """Cannot be reached for the first calls, or hangs."""

    def __init__(self, backend: StorageBackend, num_failures: int = 0) -> None:
        super().__init__(backend)
        self.num_failures = num_failures
        self.num_calls = 0
        self.timeouts_s: list[float | None] = []
        self.hang_s = 0.0

    async def _call(self) -> None:
        self.num_calls += 1
        await asyncio.sleep(self.hang_s)
        if self.num_calls <= self.num_failures:
            raise UnavailableError(f"failure {self.num_calls}")

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._call()
        return await super().batched_contains(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        self.timeouts_s.append(timeout_s)
        await self._call()
        return await super().batched_get(keys, allocate, timeout_s)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        await self._call()
        return await super().batched_put(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        await self._call()
        return await super().batched_remove(keys)


@pytest.fixture
def hot() -> LocalCPUBackend:
    return LocalCPUBackend(ArenaAllocator.anonymous(1 << 20), create_policy())


@pytest.fixture
def arena() -> Arena:
    return Arena()


def test_a_tier_that_does_not_know_what_it_holds_lists_nothing(hot: LocalCPUBackend) -> None:
    assert lister_of(Flaky(Flaky(hot))) is hot
    assert lister_of(_Bare()) is None


class _Bare(StorageBackend):
    name = "Bare"

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return []

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        return []

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        return []

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        return 0

    async def clear(self, tenant: str | None = None) -> int:
        return 0

    def stats(self) -> dict[str, int]:
        return {}


class TestLogged:
    async def test_one_line_a_call_with_counts_and_nothing_of_the_key_but_its_hash(
        self, hot: LocalCPUBackend, arena: Arena, caplog: pytest.LogCaptureFixture
    ) -> None:
        tier = LoggedBackend(hot)
        key = make_key("a", tenant="acme")
        with caplog.at_level(logging.DEBUG):
            await tier.batched_put([make_chunk("a", tenant="acme"), make_chunk("b")])
            await tier.batched_contains([key, make_key("never")])
            [got, _] = await tier.batched_get([key, make_key("never")], arena)
            await tier.batched_remove([key])
            await tier.clear()
        payload_of(got)
        short = key.key.chunk_hash[:12]
        assert [line.rsplit(", ", 1)[0] for line in caplog.messages] == [
            f"tier Hot put from {short}: 2 of 2 chunks, {2 * RECORD_BYTES} bytes",
            f"tier Hot contains from {short}: 1 of 2 chunks, 0 bytes",
            f"tier Hot get from {short}: 1 of 2 chunks, {RECORD_BYTES} bytes",
            f"tier Hot remove from {short}: 1 of 1 chunks, 0 bytes",
            "tier Hot clear from -: 1 of 0 chunks, 0 bytes",
        ]
        assert key.key.chunk_hash not in caplog.text
        assert "test/model" not in caplog.text
        assert "acme" not in caplog.text

    async def test_a_failure_is_in_the_line_and_goes_on(
        self, hot: LocalCPUBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG), pytest.raises(UnavailableError):
            await LoggedBackend(Flaky(hot, 1)).batched_contains([make_key(1)])
        assert caplog.messages[0].endswith(" ms, UnavailableError")


class TestMetered:
    async def test_everything_is_counted_by_operation_and_misses_by_reason(
        self, hot: LocalCPUBackend, arena: Arena
    ) -> None:
        counters = Counters()
        times = iter(range(100))
        tier = MeteredBackend(hot, counters, lambda: next(times) * 1e-3)
        await tier.batched_put([make_chunk(i) for i in range(3)])
        await tier.batched_contains([make_key(i) for i in range(5)])
        for result in await tier.batched_get([make_key(i) for i in range(1, 5)], arena):
            payload_of(result)
        await tier.batched_remove([make_key(0)])
        await tier.clear()
        figures = tier.stats()
        counted = {name: value for name, value in figures.items() if name not in hot.stats()}
        assert {name: value for name, value in counted.items() if "microseconds" not in name} == {
            "put_calls": 1,
            "put_chunks": 3,
            "put_bytes": 3 * RECORD_BYTES,
            "contains_calls": 1,
            "contains_chunks": 3,
            "get_calls": 1,
            "get_chunks": 2,
            "get_bytes": 2 * RECORD_BYTES,
            "missed_never_stored": 2,
            "remove_calls": 1,
            "remove_chunks": 1,
            "clear_calls": 1,
            "clear_chunks": 2,
        }
        assert all(900 < value < 1100 for name, value in counted.items() if "microseconds" in name)
        assert figures["num_chunks"] == 0
        assert counters.value(TIER_CHUNKS_TOTAL, "get") == 2
        assert counters.value(MISSED_CHUNKS_TOTAL, MissReason.NEVER_STORED) == 2

    async def test_failed_and_abandoned_calls_are_failures(self, hot: LocalCPUBackend) -> None:
        inner = Flaky(hot, 1)
        tier = MeteredBackend(inner)
        with pytest.raises(UnavailableError):
            await tier.batched_contains([make_key(1)])
        inner.hang_s = 10
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await tier.batched_contains([make_key(1)])
        assert (tier.stats()["contains_calls"], tier.stats()["contains_failures"]) == (2, 2)
        assert tier.stats()["contains_microseconds"] > 9_000


class TestFaulty:
    async def test_a_plan_of_nothing_does_nothing(self, hot: LocalCPUBackend, arena: Arena) -> None:
        tier = FaultyBackend(hot, FaultPlan(seed=1))
        await tier.batched_put([make_chunk(i) for i in range(20)])
        got = [
            payload_of(result)
            for result in await tier.batched_get([make_key(i) for i in range(20)], arena)
        ]
        assert got == [make_payload(i) for i in range(20)]
        assert tier.stats()["injected_faults"] == 0

    async def test_the_same_seed_breaks_the_same_calls(self, hot: LocalCPUBackend) -> None:
        async def history(seed: int) -> list[bool]:
            tier = FaultyBackend(hot, FaultPlan(seed, failed_calls=0.5))
            failed = []
            for _ in range(64):
                [answer] = await asyncio.gather(
                    tier.batched_contains([make_key(1)]), return_exceptions=True
                )
                failed.append(
                    isinstance(answer, UnavailableError) and f"seed={seed}" in str(answer)
                )
            return failed

        first = await history(7)
        assert await history(7) == first
        assert await history(8) != first
        assert 10 < sum(first) < 54

    async def test_a_call_that_fails_late_has_done_its_work_and_leaks_nothing(
        self, hot: LocalCPUBackend, arena: Arena
    ) -> None:
        tier = FaultyBackend(hot, FaultPlan(seed=3, failed_calls=1.0))
        num_done = 0
        for i in range(32):
            chunk = make_chunk(i, allocate=arena)
            with pytest.raises(UnavailableError):
                await tier.batched_put([chunk])
            chunk.release()
            num_done += hot.contains_many([chunk.key])[0]
        assert 4 < num_done < 28
        with pytest.raises(UnavailableError):
            await tier.batched_get(hot.keys(), arena)
        await hot.close()
        assert arena.allocator.used_bytes == 0

    async def test_chunks_are_lost_on_both_ways(self, hot: LocalCPUBackend, arena: Arena) -> None:
        tier = FaultyBackend(hot, FaultPlan(seed=5, lost_chunks=0.5))
        keys = [make_key(i) for i in range(64)]
        assert await tier.batched_put([make_chunk(i) for i in range(64)]) == [True] * 64
        kept = sum(hot.contains_many(keys))
        assert 16 < kept < 48
        got = [
            result for result in await tier.batched_get(keys, arena) if isinstance(result, Chunk)
        ]
        assert 0 < len(got) < kept
        for chunk in got:
            chunk.release()

    async def test_what_was_damaged_on_its_way_is_found_by_the_tier_and_the_caller_keeps_it_whole(
        self, tmp_path, arena: Arena
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

    async def test_calls_are_delayed(self, hot: LocalCPUBackend) -> None:
        tier = FaultyBackend(hot, FaultPlan(seed=2, delayed_calls=1.0, delay_s=10))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await tier.batched_remove([make_key(1)])

    def test_its_name_tells_the_seed(self, hot: LocalCPUBackend) -> None:
        assert "seed=42" in repr(FaultyBackend(hot, FaultPlan(seed=42)))
