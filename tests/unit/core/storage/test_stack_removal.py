"""A removed chunk stays removed, even if it was still to be written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.write_behind import BATCH_CHUNKS

from tests.fixtures.loop_clock import LoopClock
from tests.fixtures.waiting import until
from tests.suites.chunks import make_chunk, make_key

NUM_CHUNKS = 3 * BATCH_CHUNKS


class HeldDisk(DiskBackend):
    """A disk tier whose writes wait for an event, or fail as a bug would."""

    bug: type[Exception] | None = None

    def __init__(self, root: Path) -> None:
        super().__init__(root, 1 << 22)
        self.may_write = asyncio.Event()
        self.num_begun = 0

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        self.num_begun += len(chunks)
        await self.may_write.wait()
        if self.bug is not None:
            raise self.bug
        return await super().batched_put(chunks)


@pytest.fixture
async def disk(tmp_path: Path) -> HeldDisk:
    return HeldDisk(tmp_path)


@pytest.fixture
async def stack(disk: HeldDisk) -> AsyncIterator[TierStack]:
    arena = ArenaAllocator.anonymous(1 << 20)
    made = TierStack(LocalCPUBackend(arena, create_policy()), [disk])
    await made.open()
    yield made
    disk.may_write.set()
    await made.close()
    assert arena.used_bytes == 0, "a reference was not given back"


async def fill(stack: TierStack, disk: HeldDisk) -> None:
    """Leave some chunks in a write that has begun, and the others waiting."""
    assert all(await stack.batched_put([make_chunk(i) for i in range(NUM_CHUNKS)]))
    await until(lambda: disk.num_begun == BATCH_CHUNKS)


async def held(stack: TierStack, disk: HeldDisk) -> set[int]:
    assert await stack.drain(60.0)
    keys = [make_key(i) for i in range(NUM_CHUNKS)]
    hot, cold = stack.hot.contains_many(keys), await disk.batched_contains(keys)
    assert hot == cold
    return {i for i, has in enumerate(cold) if has}


async def test_removal_cancels_waiting_writes_and_waits_for_those_that_have_begun(
    stack: TierStack, disk: HeldDisk
) -> None:
    await fill(stack, disk)
    removal = asyncio.ensure_future(stack.batched_remove([make_key(0), make_key(NUM_CHUNKS - 1)]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not removal.done(), "a write that has begun would bring the chunk back"
    assert stack.hot.contains_many([make_key(0)]) == [True], "or readers would see it come back"
    disk.may_write.set()
    assert await removal == 2
    assert await held(stack, disk) == set(range(NUM_CHUNKS)) - {0, NUM_CHUNKS - 1}


async def test_clear_leaves_nothing_behind(stack: TierStack, disk: HeldDisk) -> None:
    await fill(stack, disk)
    clearing = asyncio.ensure_future(stack.clear())
    await asyncio.sleep(0)
    disk.may_write.set()
    assert await clearing == NUM_CHUNKS
    assert await held(stack, disk) == set()


async def test_writing_continues_after_a_bug(
    stack: TierStack, disk: HeldDisk, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(stack, disk)
    disk.bug = ZeroDivisionError
    disk.may_write.set()
    await until(lambda: "periodic task" in caplog.text)
    disk.bug = None
    assert await stack.drain(60.0)
    assert (
        sum(await disk.batched_contains([make_key(i) for i in range(NUM_CHUNKS)]))
        == NUM_CHUNKS - BATCH_CHUNKS
    )


async def test_write_that_outlasts_the_removal_is_undone(stack: TierStack, disk: HeldDisk) -> None:
    await fill(stack, disk)
    removal = asyncio.ensure_future(stack.batched_remove([make_key(0), make_key(1)]))
    await asyncio.sleep(0)
    LoopClock().jump()
    assert await removal == 2
    disk.may_write.set()
    assert await held(stack, disk) == set(range(2, NUM_CHUNKS))


class SlowRemoval(HeldDisk):
    """A disk tier whose removals wait, both before and after the files are gone."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_write.set()
        self.is_asked, self.may_forget, self.has_forgotten, self.may_answer = (
            asyncio.Event() for _ in range(4)
        )

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        self.is_asked.set()
        await self.may_forget.wait()
        num_removed = await super().batched_remove(keys)
        self.has_forgotten.set()
        await self.may_answer.wait()
        return num_removed


@pytest.mark.parametrize("keep_hot", [True, False])
@pytest.mark.parametrize("comes_late", [True, False])
async def test_chunk_stored_during_its_removal_stays(
    tmp_path: Path, keep_hot: bool, comes_late: bool
) -> None:
    arena, disk = ArenaAllocator.anonymous(1 << 20), SlowRemoval(tmp_path)
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [disk], keep_hot=keep_hot)
    await stack.open()
    await stack.batched_put([make_chunk(0)])
    assert await stack.drain(60.0)
    removal = asyncio.ensure_future(stack.batched_remove([make_key(0)]))
    await disk.is_asked.wait()
    if comes_late:
        disk.may_forget.set()
        await disk.has_forgotten.wait()
    assert await stack.batched_put([make_chunk(0)]) == [True]
    assert stack.hot.contains_many([make_key(0)]) == [keep_hot]
    disk.may_forget.set()
    disk.may_answer.set()
    assert await removal == 1
    assert await stack.drain(60.0)
    assert stack.hot.contains_many([make_key(0)]) == [keep_hot]
    assert await disk.batched_contains([make_key(0)]) == [True]
    await stack.close()
    assert arena.used_bytes == 0


async def test_chunk_read_during_its_removal_is_served_and_not_kept(tmp_path: Path) -> None:
    arena, disk = ArenaAllocator.anonymous(1 << 20), SlowRemoval(tmp_path)
    stack = TierStack(LocalCPUBackend(arena, create_policy()), [disk])
    await stack.open()
    await stack.batched_put([make_chunk(0)])
    assert await stack.drain(60.0)
    removal = asyncio.ensure_future(stack.batched_remove([make_key(0)]))
    await disk.is_asked.wait()
    (result,) = await stack.batched_get([make_key(0)])
    assert isinstance(result, Chunk), "the disk still has it"
    result.release()
    assert stack.hot.contains_many([make_key(0)]) == [False]
    disk.may_forget.set()
    disk.may_answer.set()
    assert await removal == 1
    assert await stack.batched_tiers([make_key(0)]) == [None]
    await stack.close()
    assert arena.used_bytes == 0
