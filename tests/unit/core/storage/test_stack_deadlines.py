"""The deadline of a read: chunks that came in time are served, the others are misses that release
their memory, and slow tiers are not asked in vain.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Allocate, Miss, MissReason, Result, release_all
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.guard import Guard, GuardOptions
from lmcache_core.storage.stack import GRACE_S, TierStack

from tests.fixtures.disk_tier import Over, file_of
from tests.fixtures.loop_clock import FAR_S, LoopClock
from tests.fixtures.timed_tier import Slow, Timed
from tests.fixtures.waiting import until
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

PATIENCE_S = 60.0
LATE = Miss(MissReason.DEADLINE)
TICK_S = 1e-5
"""Virtual time stands on ticks that are shorter."""


def names(num: int, first: int = 0) -> list[ChunkKey]:
    return [make_key(i) for i in range(first, first + num)]


async def store(stack: TierStack, *chunks: object) -> None:
    made = [make_chunk(name) for name in chunks]
    assert all(await stack.batched_put(made))
    assert await stack.drain(PATIENCE_S)


async def get(
    stack: TierStack,
    keys: Sequence[ChunkKey],
    timeout_s: float = PATIENCE_S,
    recompute_s: float | None = None,
) -> list[bytes | MissReason]:
    results = await stack.batched_get(keys, timeout_s, recompute_s=recompute_s)
    return [payload_of(result) for result in results]


async def test_chunks_read_from_disk_by_the_deadline_are_served(
    over: Over, arena: ArenaAllocator, tmp_path: Path
) -> None:
    stuck, may_open = file_of(tmp_path, 7), threading.Event()

    class StuckFiles(DiskFiles):
        """The last file cannot be opened until the deadline is over."""

        def open(self, path: Path) -> int:
            if path == stuck and not may_open.is_set():
                clock.jump()
                assert may_open.wait(PATIENCE_S)
            return super().open(path)

    clock = LoopClock()
    disk = DiskBackend(tmp_path, 1 << 22, files=StuckFiles(), num_threads=1)
    stack = await over(Guard(disk, is_priced=True))
    await store(stack, *range(8))
    stack.hot.clear_now()
    assert await get(stack, names(8), FAR_S) == [
        *(make_payload(i) for i in range(7)),
        MissReason.DEADLINE,
    ]
    assert stack.hot.contains_many(names(8)) == [True] * 7 + [False], "those are hot now"
    may_open.set()
    await until(lambda: arena.used_bytes == stack.hot.stats()["used_bytes"])
    assert await get(stack, names(8)) == [make_payload(i) for i in range(8)]


@pytest.mark.virtual_time
@pytest.mark.parametrize("limit_s", [0.02, 600.0])
async def test_tier_that_ignores_its_limit_gets_a_short_grace(over: Over, limit_s: float) -> None:
    tier, now = Timed(), asyncio.get_running_loop().time
    tier.hangs = True
    stack = await over(tier)
    began = now()
    assert await get(stack, names(3), limit_s) == [MissReason.DEADLINE] * 3
    assert now() - began == pytest.approx(limit_s + GRACE_S, abs=TICK_S)


@pytest.mark.virtual_time
async def test_time_to_compute_the_missing_chunks_bounds_a_read(over: Over) -> None:
    tier = Slow()
    stack = await over(tier)
    await store(stack, 0, 1)
    for num_missing in (1, 4):
        assert len(await get(stack, names(2 + num_missing), recompute_s=0.05)) == (2 + num_missing)
        stack.hot.remove_many(names(num_missing, 2))
    await get(stack, names(40, 2), timeout_s=0.5, recompute_s=0.05)
    assert tier.asked == [
        (1, pytest.approx(0.05, abs=TICK_S)),
        (4, pytest.approx(0.2, abs=TICK_S)),
        (40, pytest.approx(0.5, abs=TICK_S)),
    ], "and never exceeds the configured limit"
    stack.hot.clear_now()
    tier.s_per_chunk = 0.05
    found = await get(stack, names(6), recompute_s=0.03)
    assert found == [*(make_payload(make_key(i)) for i in range(3)), *[MissReason.DEADLINE] * 3]


@pytest.mark.virtual_time
async def test_next_tier_gets_the_time_that_is_left(over: Over) -> None:
    class SlowMiss(Slow):
        async def batched_get(
            self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
        ) -> list[Result]:
            release_all(await super().batched_get(keys, allocate, timeout_s))
            return [Miss(MissReason.NEVER_STORED)] * len(keys)

    first, second = SlowMiss(), Slow()
    first.latency_s, second.name = 0.2, "Second"
    stack = await over(first, second)
    assert all(isinstance(one, bytes) for one in await get(stack, names(2), 0.6))
    assert second.asked == [(2, pytest.approx(0.4, abs=TICK_S))]
    second.asked, first.hangs = [], True
    stack.hot.clear_now()
    assert await get(stack, names(2), 0.1) == [MissReason.DEADLINE] * 2
    assert second.asked == [], "no time was left"


async def read_cold(
    stack: TierStack, num: int, recompute_s: float | None = None, timeout_s: float = PATIENCE_S
) -> list[object]:
    stack.hot.clear_now()
    return await get(stack, names(num), timeout_s, recompute_s)


@pytest.mark.virtual_time
async def test_part_of_a_long_prompt_that_comes_in_time_is_read(over: Over) -> None:
    """A read that is too long as a whole used to be skipped altogether."""
    tier = Slow()
    tier.latency_s, tier.s_per_chunk = 0.005, 0.005
    stack = await over(Guard(tier, is_priced=True, clock=asyncio.get_running_loop().time))
    for num in (1, 4, 2, 8, 1, 4, 2, 8):
        await read_cold(stack, num)
    tier.asked = []
    said = await read_cold(stack, 200, timeout_s=0.2)
    [(num_asked, _)] = tier.asked
    num_read = sum(isinstance(one, bytes) for one in said)
    assert 38 <= num_read <= num_asked <= 39, "the last one may come just at the limit"
    assert said[num_read:] == [MissReason.DEADLINE] * (200 - num_read)


SHORT_S, LONG_S = 0.02, 0.2
OPTIONS = GuardOptions(num_failures=3, cool_down_s=1.0, slow_call_s=0.1)


def plain(num_bytes: int) -> None:
    return None


async def test_late_answers_to_short_deadlines_neither_open_nor_reset_a_breaker() -> None:
    tier = Timed()
    tier.latency_s = 10.0
    breaker = Guard(tier, OPTIONS, clock=tier.clock)
    for _ in range(10):
        assert await breaker.batched_get(names(1), plain, SHORT_S) == [LATE]
    assert not breaker.is_bypassed
    for _ in range(OPTIONS.num_failures):
        assert not breaker.is_bypassed
        await breaker.batched_get(names(1), plain, LONG_S)
        await breaker.batched_get(names(1), plain, SHORT_S)
    assert breaker.is_bypassed


async def test_probe_with_a_short_deadline_does_not_end_a_bypass() -> None:
    tier = Timed()
    tier.latency_s = 10.0
    breaker = Guard(tier, OPTIONS, clock=tier.clock)
    for _ in range(OPTIONS.num_failures):
        await breaker.batched_get(names(1), plain, LONG_S)
    tier.now += OPTIONS.cool_down_s
    assert await breaker.batched_get(names(1), plain, SHORT_S) == [LATE]
    assert breaker.is_bypassed
    assert await breaker.batched_get(names(1), plain, LONG_S) == [LATE], (
        "the next call is the probe"
    )
    assert await breaker.batched_get(names(1), plain, LONG_S) == [Miss(MissReason.BREAKER_OPEN)]


@pytest.mark.virtual_time
async def test_chunk_that_another_task_reads_is_waited_for_within_the_deadline(
    over: Over,
) -> None:
    tier, payload = Slow(), make_payload(make_key(0))
    tier.latency_s = 10.0
    stack = await over(tier)
    assert await asyncio.gather(get(stack, names(1)), get(stack, names(1))) == [[payload]] * 2
    stack.hot.clear_now()
    found = await asyncio.gather(get(stack, names(1)), get(stack, names(1), 5.0))
    assert found == [[payload], [MissReason.DEADLINE]]
    assert tier.num_calls == 2, "one for each pair"
