"""The deadline of a read: what came in time is served, the rest is a miss whose memory comes
back, and slow tiers are not asked in vain.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.disk.layout import DiskLayout
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.guard import MIN_OBSERVATIONS, PROBE_INTERVAL, Guard, GuardOptions
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.stack import GRACE_S, TierStack

from tests.fixtures.timed_tier import Slow, Timed
from tests.fixtures.wire import MemoryStore, serving
from tests.suites.chunks import make_chunk, make_key, make_payload
from tests.suites.faults import FaultPlan, FaultyBackend, ForwardingBackend

ARENA_BYTES = 1 << 20
PATIENCE_S = 5.0
SOON_S = 2.0
"""More than any deadline in these tests, and less than what they would wait without one."""
LATE = Miss(MissReason.DEADLINE)

MakeStack = Callable[..., AbstractAsyncContextManager[TierStack]]


@pytest.fixture
def arena() -> ArenaAllocator:
    return ArenaAllocator.anonymous(ARENA_BYTES)


@pytest.fixture
def over(arena: ArenaAllocator) -> MakeStack:
    @asynccontextmanager
    async def opened(*lower: StorageBackend) -> AsyncIterator[TierStack]:
        stack = TierStack(LocalCPUBackend(arena, create_policy()), lower)
        await stack.open()
        try:
            yield stack
        finally:
            await stack.close()
        await until_held(arena, 0)
        arena.check_integrity()

    return opened


async def until_held(arena: ArenaAllocator, num_bytes: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while arena.used_bytes != num_bytes:
            await asyncio.sleep(0.002)


def names(num: int, first: int = 0) -> list[ChunkKey]:
    return [make_key(i) for i in range(first, first + num)]


async def store(stack: TierStack, *chunks: object) -> None:
    made = [make_chunk(name) for name in chunks]
    assert all(await stack.batched_put(made))
    assert await stack.drain(PATIENCE_S)


def told(results: Sequence[Result]) -> list[bytes | MissReason]:
    """Payloads and reasons; the chunks are given back."""
    said: list[bytes | MissReason] = []
    for result in results:
        said.append(bytes(result.memory.byte_array) if isinstance(result, Chunk) else result.reason)
        if isinstance(result, Chunk):
            result.release()
    return said


async def get(
    stack: TierStack,
    keys: Sequence[ChunkKey],
    timeout_s: float = PATIENCE_S,
    recompute_s: float | None = None,
) -> list[object]:
    """What a read brings, which must not last."""
    begin = asyncio.get_running_loop().time()
    said = told(await stack.batched_get(keys, timeout_s, recompute_s=recompute_s))
    assert timeout_s == PATIENCE_S or asyncio.get_running_loop().time() - begin < timeout_s + SOON_S
    return list(said)


class StuckFiles(DiskFiles):
    """One file cannot be opened until it is let go."""

    def __init__(self, stuck: Path) -> None:
        self.stuck = stuck
        self.may_open = threading.Event()

    def open(self, path: Path) -> int:
        if path == self.stuck:
            assert self.may_open.wait(4 * PATIENCE_S)
        return super().open(path)


async def test_what_a_disk_has_read_by_the_deadline_is_served(
    over: MakeStack, arena: ArenaAllocator, tmp_path: Path
) -> None:
    files = StuckFiles(DiskLayout(tmp_path).record(make_key(3)))
    async with over(Guard(DiskBackend(tmp_path, 1 << 22, files=files), is_priced=True)) as stack:
        await store(stack, *range(8))
        stack.hot.clear_now()
        assert await get(stack, names(8), 0.3) == [
            MissReason.DEADLINE if i == 3 else make_payload(i) for i in range(8)
        ]
        assert stack.hot.contains_many(names(8)) == [i != 3 for i in range(8)], (
            "what came in time is hot now"
        )
        files.may_open.set()
        await until_held(arena, stack.hot.stats()["used_bytes"])
        assert await get(stack, names(8)) == [make_payload(i) for i in range(8)]


async def test_a_slow_server_is_a_miss_and_then_serves(
    over: MakeStack, arena: ArenaAllocator
) -> None:
    server_store = MemoryStore()
    async with serving(server_store) as server:
        remote = create_remote_backend(f"lm://127.0.0.1:{server.port}", None, PATIENCE_S)
        async with over(Guard(remote, is_priced=True)) as stack:
            await store(stack, *range(4))
            stack.hot.clear_now()
            await store(stack, 0)
            server_store.gate = asyncio.Event()
            assert await get(stack, names(4), 0.2) == [make_payload(0), *[MissReason.DEADLINE] * 3]
            await until_held(arena, stack.hot.stats()["used_bytes"])
            server_store.gate.set()
            assert await get(stack, names(4)) == [make_payload(i) for i in range(4)]


@pytest.mark.parametrize("limit_s", [0.02, 0.2])
async def test_a_tier_that_does_not_heed_its_limit_gets_some_grace_and_no_more(
    over: MakeStack, tmp_path: Path, limit_s: float
) -> None:
    plan = FaultPlan(1, delayed_calls=1.0, delay_s=1000.0)
    async with over(FaultyBackend(DiskBackend(tmp_path, 1 << 22), plan)) as stack:
        begin = asyncio.get_running_loop().time()
        assert await get(stack, names(3), limit_s) == [MissReason.DEADLINE] * 3
        assert asyncio.get_running_loop().time() - begin >= limit_s + GRACE_S - 0.01


async def test_computing_anew_bounds_the_wait_in_proportion_to_what_is_not_hot(
    over: MakeStack,
) -> None:
    tier = Slow()
    async with over(tier) as stack:
        await store(stack, 0, 1)
        for num_missing in (1, 4):
            tier.latency_s, tier.asked = 0.0, []
            assert (
                len(await get(stack, names(2 + num_missing), recompute_s=0.05)) == 2 + num_missing
            )
            [(num_asked, limit_s)] = tier.asked
            assert num_asked == num_missing
            assert limit_s == pytest.approx(0.05 * num_missing, abs=0.04)
            assert limit_s is not None
            assert limit_s <= 0.05 * num_missing
            stack.hot.remove_many(names(num_missing, 2))
        tier.asked = []
        await get(stack, names(40, 2), timeout_s=0.5, recompute_s=0.05)
        [(_, limit_s)] = tier.asked
        assert limit_s is not None
        assert limit_s <= 0.5, "and never exceeds the limit that was configured"


async def test_what_does_not_come_within_the_time_of_computing_it_is_a_miss(
    over: MakeStack,
) -> None:
    tier = Slow()
    tier.s_per_chunk = 0.05
    async with over(tier) as stack:
        said = await get(stack, names(6), recompute_s=0.03)
        assert said[3:] == [MissReason.DEADLINE] * 3
        assert all(isinstance(one, bytes) for one in said[:2])


async def test_the_next_tier_has_what_is_left_of_the_time(over: MakeStack) -> None:
    first, second = Timed(), Slow()
    first.hangs, second.name = True, "Second"
    async with over(first, second) as stack:
        assert await get(stack, names(2), 0.1) == [MissReason.DEADLINE] * 2
        assert second.asked == [], "nothing was left"
    first, second = Slow(), Slow()
    first.latency_s, second.name = 0.2, "Second"
    async with over(Without(first), second) as stack:
        assert all(isinstance(one, bytes) for one in await get(stack, names(2), 0.6))
        [(_, limit_s)] = second.asked
        assert limit_s is not None
        assert limit_s <= 0.41


class Without(ForwardingBackend):
    """A tier that looks for a while, and has nothing."""

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        told(await super().batched_get(keys, allocate, timeout_s))
        return [Miss(MissReason.NEVER_STORED)] * len(keys)


async def read_cold(
    stack: TierStack, num: int, recompute_s: float | None = None, timeout_s: float = PATIENCE_S
) -> list[object]:
    stack.hot.clear_now()
    return await get(stack, names(num), timeout_s, recompute_s)


async def test_a_tier_that_is_slower_than_computing_is_left_alone_and_tried_now_and_then(
    over: MakeStack,
) -> None:
    tier = Slow()
    tier.latency_s = 0.02
    async with over(Guard(tier, is_priced=True)) as stack:
        for _ in range(MIN_OBSERVATIONS):
            await read_cold(stack, 2, recompute_s=0.005)
        assert tier.num_calls == MIN_OBSERVATIONS, "nobody knew better"
        for _ in range(2 * PROBE_INTERVAL):
            assert await read_cold(stack, 2, recompute_s=0.005) == [MissReason.DEADLINE] * 2
        assert tier.num_calls == MIN_OBSERVATIONS + 2
        tier.latency_s = 0.0
        before = tier.num_calls
        while tier.num_calls == before:
            said = await read_cold(stack, 2, recompute_s=0.005)
        assert all(isinstance(one, bytes) for one in said)
        for _ in range(2 * MIN_OBSERVATIONS):
            assert all(
                isinstance(one, bytes) for one in await read_cold(stack, 2, recompute_s=0.5)
            ), "one probe was enough"


async def test_of_a_long_prompt_the_part_that_comes_in_time_is_read(over: MakeStack) -> None:
    """A read that is too long as a whole was once not made at all."""
    tier = Slow()
    tier.latency_s, tier.s_per_chunk = 0.005, 0.005
    async with over(Guard(tier, is_priced=True)) as stack:
        for num in (1, 4, 2, 8, 1, 4, 2, 8):
            await read_cold(stack, num)
        tier.asked = []
        said = await read_cold(stack, 200, timeout_s=0.2)
        [(num_asked, _)] = tier.asked
        assert 5 <= num_asked <= 100
        num_read = sum(isinstance(one, bytes) for one in said)
        assert num_read >= 5
        assert said[num_asked:] == [MissReason.DEADLINE] * (200 - num_asked)


async def test_short_deadlines_do_not_make_a_sound_tier_look_broken(
    over: MakeStack, tmp_path: Path
) -> None:
    breaker = Guard(DiskBackend(tmp_path, 1 << 22))
    async with over(breaker) as stack:
        await store(stack, *range(4))
        for _ in range(30):
            stack.hot.clear_now()
            await get(stack, names(4), 1e-5)
        assert not breaker.is_bypassed
        stack.hot.clear_now()
        assert await get(stack, names(4)) == [make_payload(i) for i in range(4)]


SHORT_S, LONG_S = 0.02, 0.2
OPTIONS = GuardOptions(num_failures=3, cool_down_s=1.0, slow_call_s=0.1)


def plain(num_bytes: int) -> None:
    return None


async def test_late_answers_to_short_deadlines_tell_a_breaker_nothing() -> None:
    """Neither do they open it, nor do they excuse the failures around them."""
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


async def test_a_probe_with_a_short_deadline_does_not_close_a_breaker() -> None:
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
