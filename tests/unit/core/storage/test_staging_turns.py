"""Tickets of many chunks: other tasks of the loop run meanwhile, and may change what is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Miss, Staged
from lmcache_core.storage import staging as staging_module
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.staging import STAGE_LEASE_S, ChunkBudget, Stager

from tests.fixtures.chains import (
    PAYLOAD_BYTES,
    TAKEN_BYTES,
    chain_of,
    chunk_in,
    keys_of_rank,
    names_of,
)

BLOCK_KEYS = 4
NUM_CHUNKS = 12 * BLOCK_KEYS
CHAIN = chain_of(range(NUM_CHUNKS))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "HOT_BLOCK_KEYS", BLOCK_KEYS)


class World:
    """A client of a stack in whose memory all of `CHAIN` is, and a clock that only the test
    moves.
    """

    def __init__(self, tasks: TaskSupervisor) -> None:
        self.stack = TierStack(
            LocalCPUBackend(ArenaAllocator.anonymous(4 * NUM_CHUNKS * TAKEN_BYTES), create_policy())
        )
        self.room = ChunkBudget(2 * NUM_CHUNKS * TAKEN_BYTES)
        self.now = 0.0
        self.staging = Stager(
            self.stack,
            "default",
            self.room,
            lambda lift: tasks.start("lift", lift),
            lambda: self.now,
        )
        for name in names_of(keys_of_rank(CHAIN, 0)):
            memory = self.stack.allocate(PAYLOAD_BYTES)
            assert memory is not None
            chunk = chunk_in(memory, name.key)
            assert self.stack.hot.put_many([chunk]) == [True]
            chunk.release()

    async def stage(self, ticket: str, num_chunks: int = NUM_CHUNKS) -> Staged:
        return await self.staging.run_cooperatively(
            self.staging.stage(ticket, [CHAIN.part(0, num_chunks)], deadline_s=1.0)
        )

    @property
    def num_held(self) -> int:
        """Return the number of references besides the tier's own."""
        held = self.stack.hot.peek_many(names_of(CHAIN.keys_of_rank(0)))
        return sum(entry.num_holders for entry in held if not isinstance(entry, Miss))


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    tasks = TaskSupervisor("test")
    made = World(tasks)
    await made.stack.open()
    yield made
    made.staging.run(made.staging.close())
    await tasks.close()
    assert (made.room.used_bytes, made.num_held) == (0, 0)
    made.stack.hot.check_integrity()
    await made.stack.close()


async def turns_during(work: Awaitable[object]) -> int:
    """Return how often another task of this loop runs until the work is done."""
    num_turns = 0
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    await task
    return num_turns


async def test_other_tasks_run_while_many_chunks_are_taken_and_released() -> None:
    works: list[Callable[[World], Awaitable[object]]] = [
        lambda w: w.stage("t"),
        lambda w: w.stage("t", NUM_CHUNKS - 1),  # another question, which replaces the first
        lambda w: w.staging.run_cooperatively(w.staging.unstage(["t"])),
    ]
    async with world() as w:
        assert [await turns_during(work(w)) >= NUM_CHUNKS // BLOCK_KEYS for work in works] == [
            True
        ] * 3
        assert await w.stage("t") == Staged(True, (b"\1" * NUM_CHUNKS,))
        w.now += STAGE_LEASE_S
        assert (
            await turns_during(w.staging.run_cooperatively(w.staging.expire()))
            >= NUM_CHUNKS // BLOCK_KEYS
        )
        assert w.num_held == 0
        await w.stage("t")
        assert (
            await turns_during(w.staging.run_cooperatively(w.staging.close()))
            >= NUM_CHUNKS // BLOCK_KEYS
        )
        assert w.num_held == 0


@pytest.mark.parametrize("num_steps", [1, 3, NUM_CHUNKS // BLOCK_KEYS - 1])
@pytest.mark.parametrize("ends", ["cancel", "close"])
async def test_client_that_leaves_meanwhile_is_promised_nothing(num_steps: int, ends: str) -> None:
    async with world() as w:
        staging = asyncio.ensure_future(w.stage("t"))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        assert w.num_held > 0
        if ends == "cancel":
            staging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await staging
        else:
            w.staging.run(w.staging.close())
            assert await staging == Staged(True, (bytes(NUM_CHUNKS),))
        assert (w.num_held, w.staging.num_tickets) == (0, 0)


async def test_cancelled_release_releases_everything() -> None:
    async with world() as w:
        await w.stage("t")
        unstaging = asyncio.ensure_future(w.staging.run_cooperatively(w.staging.unstage(["t"])))
        await asyncio.sleep(0)
        assert 0 < w.num_held < NUM_CHUNKS
        unstaging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unstaging
        assert w.num_held == 0


async def test_chunk_removed_meanwhile_is_held_if_it_was_seen_and_missing_otherwise() -> None:
    async with world() as w:
        names = names_of(keys_of_rank(CHAIN, 0))
        staging = asyncio.ensure_future(w.stage("t"))
        await asyncio.sleep(0)
        w.stack.hot.remove_many([names[0], names[2 * BLOCK_KEYS]])
        staged = await staging
        assert staged.tiers == (b"\1" * (2 * BLOCK_KEYS) + bytes(NUM_CHUNKS - 2 * BLOCK_KEYS),)
        assert w.room.used_bytes == 2 * BLOCK_KEYS * TAKEN_BYTES
        w.staging.run(w.staging.unstage(["t"]))
