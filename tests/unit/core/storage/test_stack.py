"""The tiers as one: order, promotion, deadlines, background writes. The slower tier is a real
disk tier, made slow or dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage import write_behind
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.disk import DiskBackend, DiskFiles
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.guard import Guard
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.served import LocalStore
from lmcache_core.storage.stack import TierStack

from tests.suites.chunks import make_chunk, make_key, make_payload

ARENA_BYTES = 1 << 20
CHUNK_BYTES = 1000


class Disk(DiskBackend):
    """A disk tier that can be told to be slow or away."""

    delay_s = 0.0
    is_away = False
    num_puts = 0

    async def _suffer(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.is_away:
            raise UnavailableError("away")

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
            for result in results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        await self._suffer()
        self.num_puts += len(chunks)
        return await super().batched_put(chunks)


class Listener:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[ChunkKey, str]] = []

    def stored(self, key: ChunkKey, tier: str, num_bytes: int) -> None:
        assert num_bytes > CHUNK_BYTES
        self.heard.append((key, tier))


@pytest.fixture
def arena() -> ArenaAllocator:
    return ArenaAllocator.anonymous(ARENA_BYTES)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "disk", 1 << 22)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def stack(arena: ArenaAllocator, disk: Disk, listener: Listener) -> AsyncIterator[TierStack]:
    made = TierStack(LocalCPUBackend(arena, create_policy()), [disk], listener=listener)
    await made.open()
    yield made
    await made.close()
    arena.check_integrity()
    assert arena.used_bytes == 0, "somebody kept a reference"


async def put(stack: TierStack, *names: str) -> list[bool]:
    chunks = [make_chunk(name, allocate=stack.allocate) for name in names]
    kept = await stack.batched_put(chunks)
    for chunk in chunks:
        chunk.release()
    return kept


def payloads(results: list[Result]) -> list[bytes | MissReason]:
    seen: list[bytes | MissReason] = []
    for result in results:
        if isinstance(result, Miss):
            seen.append(result.reason)
        else:
            seen.append(bytes(result.memory.byte_array))
            result.release()
    return seen


def tiers(results: list[Result]) -> list[str]:
    return [result.tier for result in results if isinstance(result, Chunk)]


async def test_what_is_put_is_hot_at_once_and_on_disk_soon(
    stack: TierStack, disk: Disk, listener: Listener
) -> None:
    assert await put(stack, "a", "b") == [True, True]
    assert payloads(await stack.batched_get([make_key("a"), make_key("b")])) == [
        make_payload("a"),
        make_payload("b"),
    ]
    assert await stack.drain(5.0)
    assert stack.num_pending_bytes == 0
    assert await disk.batched_contains([make_key("a"), make_key("b")]) == [True, True]
    assert set(listener.heard) == {(make_key(n), t) for n in "ab" for t in ("memory", "disk")}


async def test_what_comes_from_below_is_kept_hot(stack: TierStack) -> None:
    await put(stack, "a")
    await stack.drain(5.0)
    stack.hot.clear_now()
    first = await stack.batched_get([make_key("a")])
    assert tiers(first) == ["disk"]
    assert payloads(first) == [make_payload("a")]
    second = await stack.batched_get([make_key("a")])
    assert tiers(second) == ["memory"]
    assert payloads(second) == [make_payload("a")]


async def test_nothing_behind_a_gap_is_given_back(stack: TierStack) -> None:
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


async def test_tiers_outside_the_search_range_are_not_asked(stack: TierStack) -> None:
    await put(stack, "a")
    await stack.drain(5.0)
    assert await stack.batched_tiers([make_key("a"), make_key("b")]) == ["memory", None]
    stack.hot.clear_now()
    assert await stack.batched_tiers([make_key("a")], search_range=["memory"]) == [None]
    assert await stack.batched_tiers([make_key("a")]) == ["disk"]
    assert payloads(await stack.batched_get([make_key("a")], search_range=["memory"])) != [
        make_payload("a")
    ]


async def test_a_slow_tier_is_a_miss_at_the_deadline(stack: TierStack, disk: Disk) -> None:
    await put(stack, "a", "b")
    await stack.drain(5.0)
    stack.hot.clear_now()
    await put(stack, "a")
    disk.delay_s = 30.0
    begin = asyncio.get_running_loop().time()
    results = payloads(await stack.batched_get([make_key("a"), make_key("b")], timeout_s=0.2))
    assert asyncio.get_running_loop().time() - begin < 5.0
    assert results == [make_payload("a"), MissReason.DEADLINE]
    assert await stack.batched_tiers([make_key("b")], timeout_s=0.1) == [None]
    disk.delay_s = 0.0


async def test_a_dead_tier_is_a_miss(stack: TierStack, disk: Disk) -> None:
    await put(stack, "a")
    disk.is_away = True
    assert payloads(await stack.batched_get([make_key("a"), make_key("b")])) == [
        make_payload("a"),
        MissReason.UNAVAILABLE,
    ]
    assert await stack.batched_tiers([make_key("b")]) == [None]


async def test_a_cancelled_read_gives_its_memory_back(
    stack: TierStack, disk: Disk, arena: ArenaAllocator
) -> None:
    await put(stack, "a", "b")
    await stack.drain(5.0)
    stack.hot.clear_now()
    await put(stack, "a")
    await stack.drain(5.0)
    used = arena.used_bytes
    disk.delay_s = 30.0
    reading = asyncio.create_task(stack.batched_get([make_key("a"), make_key("b")]))
    await asyncio.sleep(0.1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert arena.used_bytes == used
    disk.delay_s = 0.0


async def test_writes_that_wait_are_bounded_and_the_rest_is_counted(
    stack: TierStack, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "MAX_WAITING_NAMES", 100)
    disk.delay_s = 30.0
    names = [f"n{i}" for i in range(700)]
    assert all(await put(stack, *names[:300]))
    assert all(await put(stack, *names[300:]))
    figures = stack.stats()["disk"]
    assert 0 < figures["pending_write_bytes"] <= ARENA_BYTES // 2
    assert figures["dropped_writes"] > 0
    assert not await stack.drain(0.05)
    disk.delay_s = 0.0


async def test_a_store_longer_than_the_bound_is_written_in_turns(
    stack: TierStack, disk: Disk
) -> None:
    """A prompt of a million tokens has 4,096 chunks; what waits may pin but half of the memory."""
    names = [f"n{i}" for i in range(600)]
    assert all(await put(stack, *names))
    assert stack.num_pending_bytes <= ARENA_BYTES // 2
    assert await stack.drain(30.0)
    assert await disk.batched_contains([make_key(name) for name in names]) == [True] * len(names)
    assert stack.stats()["disk"]["dropped_writes"] == 0


async def test_a_tier_that_answers_from_memory_lets_the_loop_turn_between_batches(
    arena: ArenaAllocator, tmp_path: Path
) -> None:
    """As a disk with a serde does for chunks that it has, and every tier while it is bypassed:
    nothing of that waits.
    """
    listener, codecs = Listener(), create_codecs({"disk_serde": "lossless"})
    disk = EncodedBackend(DiskBackend(tmp_path, ARENA_BYTES), codecs, "lossless")
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [disk], listener=listener)
    await stack.open()
    names = [f"n{i}" for i in range(200)]
    most = 0
    for _ in range(2):
        assert all(await put(stack, *names))
        while stack.num_pending_bytes:
            num_told = len(listener.heard)
            await asyncio.sleep(0)
            most = max(most, len(listener.heard) - num_told)
    assert most <= write_behind.BATCH_CHUNKS
    await stack.close()


@pytest.mark.parametrize("serde", [None, "lossless"])
async def test_what_a_disk_has_is_neither_encoded_nor_written_again(
    arena: ArenaAllocator, tmp_path: Path, serde: str | None
) -> None:
    class Counted(DiskFiles):
        num_named = 0

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            self.num_named += 1

    files, listener = Counted(), Listener()
    disk = DiskBackend(tmp_path, 1 << 22, files=files)
    tier = Guard(EncodedBackend(disk, create_codecs({"disk_serde": serde}), serde))
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [tier], listener=listener)
    await stack.open()
    for _ in range(2):
        chunk = make_chunk("a", payload=bytes(64 << 10), allocate=stack.allocate)
        assert await stack.batched_put([chunk]) == [True]
        chunk.release()
        assert await stack.drain(5.0)
        stack.hot.clear_now()
    figures = stack.stats()["disk"]
    assert files.num_named == figures["put_chunks"] == 1
    assert figures.get("encoded_chunks", 0) == (0 if serde is None else 1)
    assert listener.heard.count((make_key("a"), "disk")) == 2
    await stack.close()


async def test_of_a_long_store_what_is_evicted_before_its_turn_is_counted(
    stack: TierStack, disk: Disk
) -> None:
    names = [f"n{i}" for i in range(600)]
    disk.delay_s = 0.05
    assert all(await put(stack, *names))
    stack.hot.clear_now()
    disk.delay_s = 0.0
    assert await stack.drain(30.0)
    kept = await disk.batched_contains([make_key(name) for name in names])
    num_kept = sum(kept)
    assert 0 < num_kept < len(names)
    assert kept == [True] * num_kept + [False] * (len(names) - num_kept), "a prefix"
    assert stack.stats()["disk"]["dropped_writes"] == len(names) - num_kept


async def test_without_a_hot_tier_of_a_long_store_the_prefix_is_kept(
    arena: ArenaAllocator, disk: Disk
) -> None:
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [disk], keep_hot=False)
    await stack.open()
    sizes = [CHUNK_BYTES] * 400 + [100_000] * 3 + [CHUNK_BYTES] * 3
    chunks = [make_chunk(i, payload=make_payload(i, size)) for i, size in enumerate(sizes)]
    await stack.batched_put(chunks)
    assert await stack.drain(30.0)
    kept = await disk.batched_contains([chunk.key for chunk in chunks])
    assert kept == sorted(kept, reverse=True), "nothing behind the first that found no room"
    assert not kept[-1]
    await stack.close()


async def test_slower_tiers_share_what_may_wait(arena: ArenaAllocator, tmp_path: Path) -> None:
    disks = [Disk(tmp_path / name, 1 << 22) for name in ("a", "b")]
    disks[1].name = "OtherDisk"
    for disk in disks:
        disk.delay_s = 30.0
    stack = TierStack(LocalCPUBackend(arena, create_policy()), disks)
    await stack.open()
    await put(stack, *[f"n{i}" for i in range(600)])
    assert 0 < stack.num_pending_bytes <= ARENA_BYTES // 2
    await stack.close()


async def test_what_waits_by_name_and_is_removed_is_not_written(
    stack: TierStack, disk: Disk
) -> None:
    names = [f"n{i}" for i in range(600)]
    assert all(await put(stack, *names))
    await stack.clear()
    assert await stack.drain(30.0)
    assert not any(await disk.batched_contains([make_key(name) for name in names]))
    assert stack.stats()["disk"]["dropped_writes"] == 0


async def test_failed_writes_are_counted_and_end(stack: TierStack, disk: Disk) -> None:
    disk.is_away = True
    await put(stack, "a", "b", "c")
    assert await stack.drain(5.0)
    assert stack.stats()["disk"]["unkept_writes"] == 3
    assert disk.num_puts == 0


async def test_a_tier_that_is_not_written_to_gets_nothing(
    arena: ArenaAllocator, disk: Disk
) -> None:
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [disk], written=[])
    await stack.open()
    await put(stack, "a")
    assert await stack.drain(1.0)
    assert disk.num_puts == 0
    await stack.close()
    assert arena.used_bytes == 0


async def test_without_a_hot_tier_chunks_only_pass_through(
    arena: ArenaAllocator, disk: Disk
) -> None:
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [disk], keep_hot=False)
    await stack.open()
    assert await put(stack, "a") == [True]
    await stack.drain(5.0)
    assert arena.used_bytes == 0
    results = await stack.batched_get([make_key("a")])
    assert tiers(results) == ["disk"]
    assert payloads(results) == [make_payload("a")]
    assert arena.used_bytes == 0
    await stack.close()


async def test_a_local_store_serves_own_tiers_and_refuses_when_told(stack: TierStack) -> None:
    is_open = True
    store = LocalStore(stack, lambda: is_open)
    chunk = make_chunk("a", allocate=partial(store.allocate, tenant="default"))
    assert await store.put(chunk)
    chunk.release()
    assert await store.contains([make_key("a"), make_key("b")]) == [True, False]
    assert payloads(await store.get([make_key("a")])) == [make_payload("a")]
    is_open = False
    assert store.allocate(10, "default") is None
    other = make_chunk("b")
    assert not await store.put(other)
    assert payloads(await store.get([make_key("a")])) == [make_payload("a")]
    assert await store.remove([make_key("a")]) == 1


async def test_a_tier_that_cannot_be_opened_is_left_out(
    arena: ArenaAllocator, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    broken, good = Disk(tmp_path / "file" / "disk", 1 << 22), Disk(tmp_path / "disk", 1 << 22)
    good.name = "OtherDisk"
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [broken, good])
    await stack.open()
    assert list(stack.lower) == [good]
    await put(stack, "a")
    assert await stack.drain(5.0)
    assert good.num_puts == 1
    await stack.close()
    assert arena.used_bytes == 0


async def test_a_closed_stack_holds_nothing_for_a_later_write(
    arena: ArenaAllocator, disk: Disk
) -> None:
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [disk], keep_hot=False)
    await stack.open()
    await stack.close()
    await put(stack, "late")
    assert stack.num_pending_bytes == arena.used_bytes == 0
    assert stack.stats()["disk"]["dropped_writes"] == 1


async def test_a_local_store_removes_from_its_own_tiers_only(stack: TierStack, disk: Disk) -> None:
    await put(stack, "a")
    await stack.drain(5.0)
    disk.name = "storage"
    assert await LocalStore(stack, lambda: True).remove([make_key("a")]) == 1
    assert await disk.batched_contains([make_key("a")]) == [True], (
        "a peer's request must not reach the remote tier"
    )
    assert await stack.clear(search_range=["memory"]) == 0
    assert await disk.batched_contains([make_key("a")]) == [True]


@pytest.mark.parametrize(
    "is_stubborn", [False, True], ids=["cancelled", "ignores_its_cancellation"]
)
async def test_a_tier_whose_close_hangs_is_named_and_the_others_close(
    arena: ArenaAllocator,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_stubborn: bool,
) -> None:
    monkeypatch.setattr("lmcache_core.storage.stack.TIER_CLOSE_S", 0.2)
    monkeypatch.setattr("lmcache_core.concurrency.supervisor.CANCEL_WAIT_S", 0.2)
    let_go = asyncio.Event()

    class Hanging(LocalCPUBackend):
        name = "HangingTier"

        async def close(self) -> None:
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    if not is_stubborn:
                        raise

    hot = LocalCPUBackend(arena, create_policy())
    stack = TierStack(hot, [Hanging(arena, create_policy()), disk])
    await stack.open()
    await stack.batched_put([make_chunk("a")])
    async with asyncio.timeout(10):
        await stack.close()
    assert any("HangingTier" in record.getMessage() for record in caplog.records)
    assert hot.stats()["num_chunks"] == 0
    with pytest.raises(UnavailableError):
        await disk.batched_get([make_key("a")], arena.allocate)
    let_go.set()


async def test_a_stack_is_writing_while_chunks_wait_by_name(
    arena: ArenaAllocator, tmp_path: Path
) -> None:
    """Between two batches no bytes may be pending although the rest of a long store still waits."""
    disk = DiskBackend(tmp_path, 1 << 22)
    hot = LocalCPUBackend(arena, create_policy())
    stack = TierStack(hot, [disk], pending_bytes={disk.name: 17 * CHUNK_BYTES})
    await stack.open()
    names = [f"n{i}" for i in range(200)]
    assert not stack.is_writing
    assert all(await put(stack, *names))
    most_names = 0
    while stack.is_writing:
        most_names = max(most_names, stack.num_waiting_names)
        await asyncio.sleep(0)
    assert most_names > 100
    assert len(disk.held()) == len(names)
    assert stack.num_waiting_names == stack.num_pending_bytes == 0
    await stack.close()
    assert not stack.is_writing


async def test_a_closed_stack_writes_nothing_more(stack: TierStack, disk: Disk) -> None:
    disk.delay_s = 30.0
    await put(stack, *[f"n{i}" for i in range(600)])
    assert stack.is_writing
    await stack.close()
    assert not stack.is_writing
