"""Tickets over a stack of tiers: what counts, what is lifted, what is held, and when it is let
go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Allocate, Result, Staged
from lmcache_core.storage import staging as staging_module
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.staging import STAGE_LEASE_S, ChunkBudget, Stager

from tests.fixtures.chains import (
    PAYLOAD_BYTES,
    TAKEN_BYTES,
    Shelf,
    chain_of,
    chunk_in,
    keys_by_chunk,
    keys_of_rank,
    names_of,
)
from tests.suites.chunks import held_keys

PATIENCE_S = 30.0


@dataclass
class World:
    """Tiers, a client of them, and a clock that only the test moves."""

    allocator: ArenaAllocator
    stack: TierStack
    room: ChunkBudget
    staging: Stager
    now: float = 0.0

    def make_hot(self, names: Iterable[ChunkKey]) -> int:
        """How many of them are hot afterwards."""
        num_hot = 0
        for name in names:
            memory = self.stack.allocate(PAYLOAD_BYTES)
            if memory is not None:
                chunk = chunk_in(memory, name.key)
                num_hot += self.stack.hot.put_many([chunk])[0]
                chunk.release()
        return num_hot

    def stage(
        self, ticket: str, *chains: object, is_prefix: bool = True, deadline_s: float = PATIENCE_S
    ) -> Staged:
        return self.staging.run(
            self.staging.stage(ticket, chains, deadline_s=deadline_s, is_prefix=is_prefix)  # type: ignore[arg-type]
        )

    async def settled(self, ticket: str) -> Staged:
        """What is staged when the lift is over."""
        deadline = time.monotonic() + PATIENCE_S
        while not (staged := self.stage(ticket)).is_ready:
            assert time.monotonic() < deadline, "the lift does not end"
            await asyncio.sleep(0.001)
        return staged


@asynccontextmanager
async def world(*lower: Shelf, num_chunks: int = 64, keep_hot: bool = True) -> AsyncIterator[World]:
    """Half of so many chunks can be staged. Afterwards nothing may be held."""
    allocator = ArenaAllocator.anonymous(num_chunks * TAKEN_BYTES)
    stack = TierStack(
        LocalCPUBackend(allocator, create_policy()), lower, written=(), keep_hot=keep_hot
    )
    await stack.open()
    tasks = TaskSupervisor("test")
    room = ChunkBudget(num_chunks * TAKEN_BYTES // 2)
    made: list[World] = []
    staging = Stager(
        stack, "default", room, lambda lift: tasks.start("lift", lift), lambda: made[0].now
    )
    made.append(World(allocator, stack, room, staging))
    try:
        yield made[0]
    finally:
        staging.run(staging.close())
        await tasks.close()
    assert room.used_bytes == 0
    assert allocator.used_bytes == stack.hot.stats()["used_bytes"], "a reference was not given back"
    stack.hot.check_integrity()
    await stack.close()
    allocator.check_integrity()


async def test_what_is_hot_is_ready_at_once() -> None:
    chain = chain_of(range(4))
    async with world() as w:
        w.make_hot(names_of(keys_of_rank(chain, 0))[:3])
        assert w.stage("t", chain) == Staged(True, (b"\1\1\1\0",))


async def test_a_prefix_ends_at_the_first_gap_and_a_window_does_not() -> None:
    chain = chain_of(range(5))
    async with world() as w:
        names = names_of(keys_of_rank(chain, 0))
        w.make_hot([names[0], names[1], names[3]])
        assert w.stage("prefix", chain).tiers == (b"\1\1\0\0\0",)
        assert w.room.used_bytes == 2 * TAKEN_BYTES
        assert w.stage("window", chain, is_prefix=False).tiers == (b"\1\1\0\1\0",)
        assert w.room.used_bytes == 3 * TAKEN_BYTES, "a chunk that two tickets hold counts once"


async def test_a_chunk_counts_when_all_ranks_have_it() -> None:
    chain = chain_of(range(3), world_size=2)
    async with world() as w:
        w.make_hot(names_of(keys_of_rank(chain, 0)))
        assert w.stage("t1", chain).tiers == (b"\0\0\0",)
        w.make_hot(names_of(keys_of_rank(chain, 1))[:2])
        assert w.stage("t2", chain).tiers == (b"\1\1\0",)
        assert w.room.used_bytes == 4 * TAKEN_BYTES


async def test_what_is_missing_is_lifted_while_the_request_waits() -> None:
    disk, remote = Shelf("disk"), Shelf("storage")
    chain = chain_of(range(6))
    names = names_of(keys_of_rank(chain, 0))
    disk.held, remote.held = {names[1], names[3]}, {names[2], names[5]}
    async with world(disk, remote) as w:
        w.make_hot(names[:1])
        assert w.stage("t", chain) == Staged(False, (b"\1\0\0\0\0\0",))
        assert await w.settled("t") == Staged(True, (b"\1\2\4\2\0\0",))
        assert w.stage("t", chain) == Staged(True, (b"\1\2\4\2\0\0",)), (
            "the same question gets the same answer"
        )
        assert set(disk.num_read) == {names[1], names[3]}
        assert set(remote.num_read) == {names[2]}, "behind the first gap nothing is read"
        assert all(w.stack.hot.contains_many(names[:4]))


@pytest.mark.parametrize(
    ("name", "code"),
    [("disk", 2), ("peers", 3), ("storage", 4), ("AnotherTier", 5)],
)
async def test_the_tier_is_told_and_it_is_the_slowest_ranks(name: str, code: int) -> None:
    shelf = Shelf(name)
    chain = chain_of(range(2), world_size=2)
    async with world(shelf) as w:
        w.make_hot(names_of(keys_of_rank(chain, 0)))
        shelf.held.update(names_of(keys_of_rank(chain, 1)))
        w.stage("t", chain)
        assert (await w.settled("t")).tiers == (bytes([code, code]),)


async def test_a_chunk_that_one_rank_lacks_is_not_lifted_for_the_other() -> None:
    shelf = Shelf()
    chain = chain_of(range(2), world_size=2)
    async with world(shelf) as w:
        shelf.held.update(names_of(keys_by_chunk(chain))[:3])
        w.stage("t", chain)
        assert (await w.settled("t")).tiers == (b"\2\0",)
        assert set(shelf.num_read) == set(names_of(keys_by_chunk(chain))[:2])


async def test_what_is_held_is_not_evicted_and_afterwards_is() -> None:
    chain, others = chain_of(range(8)), chain_of(range(100, 200))
    async with world(num_chunks=16) as w:
        w.make_hot(names_of(keys_of_rank(chain, 0)))
        assert w.stage("t", chain).tiers == (b"\1" * 8,)
        w.make_hot(names_of(keys_of_rank(others, 0)))
        assert all(w.stack.hot.contains_many(names_of(keys_of_rank(chain, 0))))
        w.staging.run(w.staging.unstage(["t", "unknown"]))
        w.stack.hot.evict_bytes(1 << 20)
        assert not any(w.stack.hot.contains_many(names_of(keys_of_rank(chain, 0))))


async def test_no_more_than_half_of_the_arena_is_promised() -> None:
    chain, rest = chain_of(range(6)), chain_of(range(6, 12), world_size=1)
    async with world(num_chunks=16) as w:
        w.make_hot(names_of([*keys_of_rank(chain, 0), *keys_of_rank(rest, 0)]))
        assert w.stage("first", chain).tiers == (b"\1" * 6,)
        assert w.stage("second", rest).tiers == (b"\1\1\0\0\0\0",)
        w.staging.run(w.staging.unstage(["first"]))
        assert w.stage("third", rest).tiers == (b"\1" * 6,)


async def test_what_would_find_no_room_is_not_read() -> None:
    shelf = Shelf()
    chain = chain_of(range(40))
    shelf.held.update(names_of(keys_of_rank(chain, 0)))
    async with world(shelf, num_chunks=16) as w:
        w.make_hot(names_of(keys_of_rank(chain, 0))[:2])
        w.stage("t", chain)
        assert (await w.settled("t")).tiers == (b"\1\1" + b"\2" * 6 + bytes(32),)
        assert len(shelf.num_read) == 6
        assert w.stage("u", chain_of(range(10, 20))) == Staged(True, (bytes(10),)), (
            "the room is full: nothing is lifted"
        )


async def test_ranks_are_held_together_or_not_at_all() -> None:
    chain = chain_of(range(3), world_size=3)
    async with world(num_chunks=10) as w:
        w.make_hot(names_of(keys_by_chunk(chain)))
        assert w.stage("t", chain).tiers == (b"\1\0\0",)
        assert w.room.used_bytes == 3 * TAKEN_BYTES


async def test_other_chains_under_a_ticket_are_a_new_question() -> None:
    short, longer = chain_of(range(2)), chain_of(range(3))
    async with world() as w:
        w.make_hot(names_of(keys_of_rank(short, 0)))
        assert w.stage("t", short).tiers == (b"\1\1",)
        w.make_hot(names_of(keys_of_rank(longer, 0)))
        assert w.stage("t", longer).tiers == (b"\1\1\1",)
        assert w.staging.num_tickets == 1
        assert w.room.used_bytes == 3 * TAKEN_BYTES


async def test_a_question_about_nothing_holds_nothing() -> None:
    async with world() as w:
        assert w.stage("never asked") == Staged(True, ())
        assert w.stage("empty", chain_of([])) == Staged(True, (b"",))
        assert w.room.used_bytes == 0


async def test_a_ticket_that_nobody_speaks_about_is_forgotten() -> None:
    chain = chain_of(range(2))
    async with world() as w:
        w.make_hot(names_of(keys_of_rank(chain, 0)))
        w.stage("old", chain)
        w.now = STAGE_LEASE_S - 1
        w.stage("kept", chain)
        w.staging.run(w.staging.expire())
        assert w.staging.num_tickets == 2
        w.stage("old")
        w.now += 2
        w.staging.run(w.staging.expire())
        assert w.staging.num_tickets == 2, "a word about it renews its lease"
        w.now = STAGE_LEASE_S - 1 + STAGE_LEASE_S
        w.stage("another", chain)
        assert w.staging.num_tickets == 1
        assert w.stage("old") == Staged(True, ())


async def test_a_ticket_that_is_polled_outlives_one_that_is_not() -> None:
    chain = chain_of(range(2))
    async with world() as w:
        w.make_hot(names_of(keys_of_rank(chain, 0)))
        w.stage("polled", chain)
        w.now = STAGE_LEASE_S - 1
        w.stage("polled")
        w.now = STAGE_LEASE_S + 1
        w.staging.run(w.staging.expire())
        assert w.staging.num_tickets == 1
        assert w.stage("polled").tiers == (b"\1\1",)


async def test_a_client_has_a_bounded_number_of_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "MAX_TICKETS", 3)
    chain = chain_of(range(2))
    async with world() as w:
        w.make_hot(names_of(keys_of_rank(chain, 0)))
        assert [w.stage(f"t{i}", chain).tiers[0] for i in range(4)] == [b"\1\1"] * 3 + [b"\0\0"]
        w.staging.run(w.staging.unstage(["t1"]))
        assert w.stage("t3", chain).tiers == (b"\1\1",)


async def test_while_draining_what_is_hot_is_staged_and_nothing_lifted() -> None:
    shelf = Shelf()
    chain = chain_of(range(2))
    shelf.held.update(names_of(keys_of_rank(chain, 0)))
    async with world(shelf) as w:
        w.make_hot(names_of(keys_of_rank(chain, 0))[:1])
        w.staging.may_lift = False
        assert w.stage("t", chain) == Staged(True, (b"\1\0",))
        assert not shelf.num_read


async def test_a_lift_ends_at_its_deadline_and_a_tier_that_hangs_costs_the_others_nothing() -> None:
    disk, remote = Shelf("disk"), Shelf("storage")
    chain = chain_of(range(4))
    names = names_of(keys_of_rank(chain, 0))
    disk.held.update(names[:2])
    remote.hangs = True
    async with world(disk, remote) as w:
        begin = time.monotonic()
        assert not w.stage("t", chain, deadline_s=0.2).is_ready
        assert await w.settled("t") == Staged(True, (b"\2\2\0\0",))
        assert time.monotonic() - begin < 1.0


async def test_a_lift_takes_no_longer_than_computing_would() -> None:
    shelf = Shelf()
    shelf.hangs = True
    async with world(shelf) as w:
        begin = time.monotonic()
        w.staging.run(w.staging.stage("t", [chain_of(range(4))], deadline_s=60.0, recompute_s=0.02))
        assert (await w.settled("t")).tiers == (bytes(4),)
        assert time.monotonic() - begin < 1.0


class Gated(Shelf):
    """Its reads say that they have begun, and wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        self.began.set()
        await self.may_go_on.wait()
        return await super().batched_get(keys, allocate, timeout_s)


async def test_what_a_lift_brings_for_nobody_stays_hot_and_is_not_held() -> None:
    shelf = Gated()
    chain = chain_of(range(3))
    names = names_of(keys_of_rank(chain, 0))
    shelf.held.update(names)
    async with world(shelf) as w:
        w.stage("t", chain)
        async with asyncio.timeout(PATIENCE_S):
            await shelf.began.wait()
        w.staging.run(w.staging.unstage(["t"]))
        shelf.may_go_on.set()
        deadline = time.monotonic() + PATIENCE_S
        while not all(w.stack.hot.contains_many(names)):
            assert time.monotonic() < deadline, "what was being read was thrown away"
            await asyncio.sleep(0.001)
        assert w.room.used_bytes == 0


async def test_a_long_chain_costs_what_is_there_of_it() -> None:
    shelf = Shelf()
    chain = chain_of(range(60_000))
    names = names_of(keys_of_rank(chain.part(0, 2000), 0))
    shelf.held.update(names[1000:])
    async with world(shelf, num_chunks=8192) as w:
        w.make_hot(names[:1000])
        assert w.stage("t", chain) == Staged(False, (b"\1" * 1000 + bytes(59_000),))
        assert (await w.settled("t")).tiers == (b"\1" * 1000 + b"\2" * 1000 + bytes(58_000),)
        assert shelf.num_asked <= 2 * staging_module.LIFT_BLOCK_KEYS


async def test_a_closed_client_is_promised_nothing() -> None:
    shelf = Shelf()
    chain = chain_of(range(3))
    shelf.held.update(names_of(keys_of_rank(chain, 0)))
    async with world(shelf) as w:
        w.make_hot(names_of(keys_of_rank(chain, 0))[:1])
        w.stage("t", chain)
        w.staging.run(w.staging.close())
        w.staging.run(w.staging.close())
        assert w.stage("t", chain) == Staged(True, (bytes(3),))


async def test_without_a_hot_tier_staged_chunks_are_hot_until_they_are_given_back() -> None:
    shelf = Shelf()
    chain = chain_of(range(3))
    names = names_of(keys_of_rank(chain, 0))
    shelf.held.update(names)
    async with world(shelf, keep_hot=False) as w:
        w.stage("t", chain)
        w.stage("u", chain_of(range(2)))
        assert (await w.settled("t")).tiers == (b"\2\2\2",)
        await w.settled("u")
        w.staging.run(w.staging.unstage(["t"]))
        assert w.stack.hot.contains_many(names) == [True, True, False]
        w.staging.run(w.staging.unstage(["u"]))
        assert not any(w.stack.hot.contains_many(names))
        assert w.allocator.used_bytes == 0


def expected(places: list[list[int]], is_prefix: bool, hot_only: bool) -> bytes:
    """By the book: the slowest of a chunk's ranks, 0 where one is nowhere; places are 0
    (nowhere), 1 (hot), 2 (disk), 4 (remote).
    """
    codes = [0 if 0 in ranks or (hot_only and max(ranks) > 1) else max(ranks) for ranks in places]
    if is_prefix and 0 in codes:
        first = codes.index(0)
        codes[first:] = [0] * (len(codes) - first)
    return bytes(codes)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda ranks: st.lists(
            st.lists(
                st.lists(st.sampled_from([0, 1, 1, 2, 4]), min_size=ranks, max_size=ranks),
                max_size=6,
            ),
            min_size=1,
            max_size=3,
        )
    ),
    st.booleans(),
)
def test_every_constellation_is_staged_by_the_book(
    chains: list[list[list[int]]], is_prefix: bool
) -> None:
    async def check() -> None:
        disk, remote = Shelf("disk"), Shelf("storage")
        async with world(disk, remote, num_chunks=256) as w:
            asked = []
            for number, places in enumerate(chains):
                chain = chain_of(
                    range(len(places)),
                    world_size=len(places[0]) if places else 1,
                    group=f"group{number}",
                )
                asked.append(chain)
                flat = [place for ranks in places for place in ranks]
                for name, place in zip(names_of(keys_by_chunk(chain)), flat, strict=True):
                    if place == 1:
                        w.make_hot([name])
                    else:
                        {0: set(), 2: disk.held, 4: remote.held}[place].add(name)
            now = w.stage("t", *asked, is_prefix=is_prefix)
            assert now.tiers == tuple(
                expected(places, is_prefix, hot_only=True) for places in chains
            )
            assert (await w.settled("t")).tiers == tuple(
                expected(places, is_prefix, hot_only=False) for places in chains
            )
            held = {
                name
                for chain, tiers in zip(asked, w.stage("t").tiers, strict=True)
                for i, name in enumerate(names_of(keys_by_chunk(chain)))
                if tiers[i // chain.world_size]
            }
            assert w.room.used_bytes == len(held) * TAKEN_BYTES
            w.stack.hot.evict_bytes(1 << 20)
            assert set(held_keys(w.stack.hot)) == held, "everything but what is held can be evicted"

    asyncio.run(check())
