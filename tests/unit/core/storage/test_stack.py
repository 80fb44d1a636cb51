"""The tiers as one: order, promotion, background writes, over a real disk tier that may hang or be
unavailable. The deadline of a read: chunks that came in time are served, the others are misses that
release their memory, and slow tiers are not asked in vain.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.storage import write_behind
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.expected import EXPECTED_S
from lmcache_core.storage.guard import Guard, GuardOptions
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.served import LocalStore
from lmcache_core.storage.stack import GRACE_S, TierStack

from tests.fixtures.codecs import ZlibCodec, codecs_of
from tests.fixtures.disk_tier import Over, file_of
from tests.fixtures.loop_clock import FAR_S, LoopClock
from tests.fixtures.timed_tier import Slow, Timed
from tests.fixtures.waiting import until
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import held_keys, make_chunk, make_key, make_payload

ARENA_BYTES = 1 << 20
CHUNK_BYTES = 1000


class Disk(DiskBackend):
    """A disk tier whose calls wait for `may_answer` and then raise the next one of `errors`."""

    num_calls = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root, 1 << 22)
        self.errors: Iterator[Exception] = iter(())
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def _suffer(self) -> None:
        self.num_calls += 1
        await self.may_answer.wait()
        for error in self.errors:
            raise error

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._suffer()
        return await super().batched_contains(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        results = await super().batched_get(keys, allocate)
        try:
            await self._suffer()
        except BaseException:
            release_all(results)
            raise
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        await self._suffer()
        return await super().batched_put(chunks)


class Listener:
    """Records which chunks were stored in which tier."""

    def __init__(self) -> None:
        self.stored_chunks: list[tuple[ChunkKey, str]] = []

    def stored(self, key: ChunkKey, tier: str, num_bytes: int) -> None:
        assert num_bytes > CHUNK_BYTES
        self.stored_chunks.append((key, tier))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "disk")


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def stack(over: Over, disk: Disk, listener: Listener) -> TierStack:
    return await over(disk, listener=listener)


async def put(stack: TierStack, *names: str) -> list[bool]:
    chunks = [make_chunk(name, allocate=stack.allocate) for name in names]
    kept = await stack.batched_put(chunks)
    for chunk in chunks:
        chunk.release()
    return kept


def payloads(results: Sequence[Result]) -> list[bytes | MissReason]:
    return [payload_of(result) for result in results]


async def test_chunk_is_hot_at_once_on_disk_soon_and_promoted_when_read_from_there(
    stack: TierStack, disk: Disk, listener: Listener
) -> None:
    keys = [make_key("a"), make_key("b")]
    assert await put(stack, "a", "b") == [True, True]
    assert payloads(await stack.batched_get(keys)) == [make_payload("a"), make_payload("b")]
    assert await stack.drain(60.0)
    assert stack.num_pending_bytes == 0
    assert await disk.batched_contains(keys) == [True, True]
    assert set(listener.stored_chunks) == {
        (key, tier) for key in keys for tier in ("memory", "disk")
    }
    stack.hot.clear_now()
    for tier in ("disk", "memory"):
        [result] = await stack.batched_get(keys[:1])
        assert isinstance(result, Chunk)
        assert result.tier == tier
        assert payload_of(result) == make_payload("a")


async def test_prefix_read_returns_nothing_after_a_gap(stack: TierStack) -> None:
    await put(stack, "a", "c")
    keys = [make_key(name) for name in "abc"]
    assert payloads(await stack.batched_get(keys, prefix_only=True)) == [
        make_payload("a"),
        MissReason.NEVER_STORED,
        MissReason.NEVER_STORED,
    ]
    assert payloads(await stack.batched_get(keys)) == [
        make_payload("a"),
        MissReason.NEVER_STORED,
        make_payload("c"),
    ]


async def test_unavailable_tier_is_a_miss_at_once(stack: TierStack, disk: Disk) -> None:
    await put(stack, "a", "b")
    await stack.drain(60.0)
    stack.hot.clear_now()
    await put(stack, "a")
    await stack.drain(60.0)
    keys = [make_key("a"), make_key("b")]
    disk.errors = itertools.repeat(UnavailableError("away"))
    assert payloads(await stack.batched_get(keys)) == [make_payload("a"), MissReason.UNAVAILABLE]
    assert await stack.batched_tiers(keys[1:]) == [None]
    await put(stack, "c")
    assert await stack.drain(60.0)
    assert stack.stats()["disk"]["unkept_writes"] == 1


async def test_slower_tiers_share_the_memory_of_waiting_writes(
    over: Over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it chunks wait by name, and so many names are the bound of what is not dropped."""
    monkeypatch.setattr(write_behind, "MAX_WAITING_NAMES", 100)
    disks = [Disk(tmp_path / name) for name in ("a", "b")]
    disks[1].name = "OtherDisk"
    for disk in disks:
        disk.may_answer.clear()
    stack = await over(*disks)
    for first in (0, 300):
        assert all(await put(stack, *[f"n{i}" for i in range(first, first + 300)]))
    assert 0 < stack.num_pending_bytes <= ARENA_BYTES // 2
    assert all(stack.stats()[disk.name]["dropped_writes"] > 0 for disk in disks)
    assert not await stack.drain(0.05)
    await stack.close()
    assert not stack.is_writing, "a closed stack writes nothing more"


async def test_writes_that_need_no_device_let_other_tasks_run_between_batches(
    over: Over, tmp_path: Path
) -> None:
    """As a disk with a serde does for chunks that it has, and every tier while it is bypassed."""
    listener, codecs = Listener(), codecs_of(ZlibCodec("lossless"))
    disk = EncodedBackend(DiskBackend(tmp_path, ARENA_BYTES), codecs, "lossless")
    stack = await over(disk, listener=listener)
    names = [f"n{i}" for i in range(200)]
    most = 0
    for _ in range(2):
        assert all(await put(stack, *names))
        while stack.num_pending_bytes:
            num_stored = len(listener.stored_chunks)
            await asyncio.sleep(0)
            most = max(most, len(listener.stored_chunks) - num_stored)
    assert most <= write_behind.BATCH_CHUNKS


@pytest.mark.parametrize("serde", [None, "lossless"])
async def test_chunk_on_disk_is_neither_encoded_nor_written_again(
    over: Over, tmp_path: Path, serde: str | None
) -> None:
    class Counted(DiskFiles):
        num_named = 0

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            self.num_named += 1

    files, listener = Counted(), Listener()
    disk = DiskBackend(tmp_path, 1 << 22, files=files)
    tier = Guard(EncodedBackend(disk, codecs_of(ZlibCodec("lossless")), serde))
    stack = await over(tier, listener=listener)
    for _ in range(2):
        chunk = make_chunk("a", payload=bytes(64 << 10), allocate=stack.allocate)
        assert await stack.batched_put([chunk]) == [True]
        chunk.release()
        assert await stack.drain(60.0)
        stack.hot.clear_now()
    figures = stack.stats()["disk"]
    assert files.num_named == figures["put_chunks"] == 1
    assert figures.get("encoded_chunks", 0) == (0 if serde is None else 1)
    assert listener.stored_chunks.count((make_key("a"), "disk")) == 2


async def test_chunk_removed_while_it_waits_by_name_is_not_written(
    stack: TierStack, disk: Disk
) -> None:
    names = [f"n{i}" for i in range(600)]
    assert all(await put(stack, *names))
    await stack.clear()
    assert await stack.drain(60.0)
    assert held_keys(disk) == []
    assert stack.stats()["disk"]["dropped_writes"] == 0


async def test_without_a_hot_tier_chunks_only_pass_through_memory(
    over: Over, arena: ArenaAllocator, disk: Disk
) -> None:
    stack = await over(disk, keep_hot=False)
    assert await put(stack, "a") == [True]
    await stack.drain(60.0)
    assert arena.used_bytes == 0
    assert payloads(await stack.batched_get([make_key("a")])) == [make_payload("a")]
    assert arena.used_bytes == 0
    await stack.close()
    await put(stack, "late")
    assert stack.num_pending_bytes == arena.used_bytes == 0
    assert stack.stats()["disk"]["dropped_writes"] == 1


async def test_local_store_serves_its_own_tiers_and_refuses_puts_while_closed(
    stack: TierStack, disk: Disk
) -> None:
    is_open = True
    store, key = LocalStore(stack, lambda: is_open), make_key("a")
    chunk = make_chunk("a", allocate=partial(store.allocate, tenant="default"))
    assert await store.put(chunk)
    chunk.release()
    assert await store.contains([key, make_key("b")]) == [True, False]
    is_open = False
    assert store.allocate(10, "default") is None
    assert not await store.put(make_chunk("b"))
    assert payloads(await store.get([key])) == [make_payload("a")]
    assert await stack.drain(60.0)
    disk.name = "storage"
    assert await store.remove([key]) == 1
    assert await stack.clear(search_range=["memory"]) == 0
    assert await disk.batched_contains([key]) == [True], "peers do not reach the remote tier"


@pytest.mark.virtual_time
async def test_tier_whose_close_hangs_is_named_and_the_others_close(
    arena: ArenaAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging(LocalCPUBackend):
        """Ignores its cancellation."""

        name = "HangingTier"
        may_close = asyncio.Event()

        async def close(self) -> None:
            while not self.may_close.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.may_close.wait()

    hot, hanging, other = (
        kind(arena, create_policy()) for kind in (LocalCPUBackend, Hanging, LocalCPUBackend)
    )
    stack = TierStack(hot, [hanging, other])
    await stack.open()
    await stack.batched_put([make_chunk("a")])
    await stack.close()
    assert any("HangingTier" in record.getMessage() for record in caplog.records)
    assert hot.stats()["num_chunks"] == other.stats()["num_chunks"] == 0
    Hanging.may_close.set()


async def test_stack_is_writing_while_chunks_wait_by_name(over: Over, disk: Disk) -> None:
    """Between two batches no bytes may be pending although the rest of a long store still waits."""
    stack = await over(disk, pending_bytes={disk.name: 17 * CHUNK_BYTES})
    names = [f"n{i}" for i in range(200)]
    assert not stack.is_writing
    assert all(await put(stack, *names))
    most_names = 0
    while stack.is_writing:
        most_names = max(most_names, stack.num_waiting_names)
        await asyncio.sleep(0)
    assert most_names > 100
    assert len(disk.held()) == len(names), "written in batches, none dropped"
    assert stack.num_waiting_names == stack.num_pending_bytes == 0


async def test_write_that_outlasts_the_removal_is_undone(stack: TierStack, disk: Disk) -> None:
    disk.may_answer.clear()
    await put(stack, "a", "b", "c")
    await until(lambda: disk.num_calls)
    removal = asyncio.ensure_future(stack.batched_remove([make_key("a"), make_key("b")]))
    await asyncio.sleep(0)
    LoopClock().jump()
    assert await removal == 2
    disk.may_answer.set()
    assert await stack.drain(60.0)
    assert held_keys(stack.hot) == held_keys(disk) == [make_key("c")]


@pytest.mark.parametrize("keep_hot", [True, False])
@pytest.mark.parametrize("comes_late", [True, False])
async def test_chunk_stored_during_its_removal_stays(
    over: Over, tmp_path: Path, keep_hot: bool, comes_late: bool
) -> None:
    class SlowRemoval(Disk):
        """Its removals wait, both before and after the files are gone."""

        is_asked, may_remove, has_removed, may_return = (asyncio.Event() for _ in range(4))

        async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
            self.is_asked.set()
            await self.may_remove.wait()
            num_removed = await super().batched_remove(keys)
            self.has_removed.set()
            await self.may_return.wait()
            return num_removed

    disk, key = SlowRemoval(tmp_path), make_key("a")
    stack = await over(disk, keep_hot=keep_hot)
    await put(stack, "a")
    assert await stack.drain(60.0)
    removal = asyncio.ensure_future(stack.batched_remove([key]))
    await disk.is_asked.wait()
    if comes_late:
        disk.may_remove.set()
        await disk.has_removed.wait()
    await put(stack, "a")
    assert stack.hot.contains_many([key]) == [keep_hot]
    disk.may_remove.set()
    disk.may_return.set()
    assert await removal == 1
    assert await stack.drain(60.0)
    assert stack.hot.contains_many([key]) == [keep_hot]
    assert held_keys(disk) == [key]


async def test_chunks_of_a_long_store_evicted_before_their_write_are_counted(
    stack: TierStack, disk: Disk
) -> None:
    names = [f"n{i}" for i in range(600)]
    disk.may_answer.clear()
    assert all(await put(stack, *names))
    stack.hot.clear_now()
    disk.may_answer.set()
    assert await stack.drain(60.0)
    kept = await disk.batched_contains([make_key(name) for name in names])
    num_kept = sum(kept)
    assert 0 < num_kept < len(names)
    assert kept == [True] * num_kept + [False] * (len(names) - num_kept), "a prefix"
    assert stack.stats()["disk"]["dropped_writes"] == len(names) - num_kept


async def test_without_a_hot_tier_the_prefix_of_a_long_store_is_kept(
    over: Over, disk: Disk
) -> None:
    stack = await over(disk, keep_hot=False)
    sizes = [CHUNK_BYTES] * 400 + [100_000] * 3 + [CHUNK_BYTES] * 3
    chunks = [make_chunk(i, payload=make_payload(i, size)) for i, size in enumerate(sizes)]
    await stack.batched_put(chunks)
    assert await stack.drain(60.0)
    kept = await disk.batched_contains([chunk.key for chunk in chunks])
    assert kept == sorted(kept, reverse=True), "nothing after the first that found no room"
    assert not kept[-1]


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


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("recompute_s", "waited_s"), [(None, EXPECTED_S), (0.02, 2 * 0.02), (1.0, EXPECTED_S)]
)
async def test_chunk_that_a_client_is_writing_is_waited_for_no_longer_than_it_is_worth(
    over: Over, recompute_s: float | None, waited_s: float
) -> None:
    stack = await over()
    for key in names(2):
        stack.expected.add(key)
    began = asyncio.get_running_loop().time()
    got = await get(stack, names(2), recompute_s=recompute_s)
    assert got == [MissReason.NEVER_STORED] * 2
    assert asyncio.get_running_loop().time() - began == pytest.approx(waited_s, abs=TICK_S)


async def test_chunk_that_is_put_while_it_is_waited_for_is_served(over: Over) -> None:
    stack = await over()
    for key in names(3):
        stack.expected.add(key)
    reading = asyncio.create_task(get(stack, names(3)))
    await asyncio.sleep(0)
    await store(stack, 0, 1)
    stack.expected.end(names(3))
    assert await reading == [make_payload(0), make_payload(1), MissReason.NEVER_STORED]
