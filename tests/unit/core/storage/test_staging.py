"""Tickets over a stack of tiers: which chunks count, are lifted and held, and when they are
released.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.keys import TAIL, ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Allocate, Miss, Result, Staged
from lmcache_core.storage import staging as staging_module
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.expected import EXPECTED_S
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.staging import (
    AGAIN_S,
    PROBE_SHARE,
    STAGE_LEASE_S,
    ChunkBudget,
    Stager,
)

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
from tests.fixtures.waiting import until
from tests.suites.chunks import held_keys

PATIENCE_S = 60.0
POLL_S = 0.021
"""Between two looks of a test that waits."""


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
        """Return what is staged when the lift is over."""
        await until(lambda: self.stage(ticket).is_ready)
        return self.stage(ticket)


@asynccontextmanager
async def world(*lower: Shelf, num_chunks: int = 64, keep_hot: bool = True) -> AsyncIterator[World]:
    """Yield tiers of which half of `num_chunks` can be staged. At the end nothing may be held."""
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


async def test_chunk_that_would_find_no_room_is_not_read() -> None:
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


@pytest.mark.parametrize("when", ["expired", "staged"])
async def test_unused_ticket_expires_and_a_polled_one_does_not(when: str) -> None:
    chain = chain_of(range(2))
    async with world() as w:
        w.make_hot(names_of(keys_of_rank(chain, 0)))
        w.stage("polled", chain)
        w.now = 1.0
        w.stage("unused", chain)
        w.now = STAGE_LEASE_S - 1
        w.stage("polled")
        w.now = STAGE_LEASE_S + 1
        if when == "expired":
            w.staging.run(w.staging.expire())
        else:
            w.stage("another", chain)
            w.staging.run(w.staging.unstage(["another"]))
        assert w.staging.num_tickets == 1
        assert w.stage("polled").tiers == (b"\1\1",)
        assert w.stage("unused") == Staged(True, ())


class Gated(Shelf):
    """Its reads report that they have begun, and wait."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_continue = asyncio.Event(), asyncio.Event()

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        self.began.set()
        await self.may_continue.wait()
        return await super().batched_get(keys, allocate, timeout_s)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("hangs_at_once", "recompute_s", "limit_s"),
    [(False, None, 40.0), (True, None, 40.0 / PROBE_SHARE), (True, 1.0, 4.0 / PROBE_SHARE)],
)
async def test_lift_ends_at_its_deadline_and_keeps_the_chunks_of_other_tiers(
    hangs_at_once: bool, recompute_s: float | None, limit_s: float
) -> None:
    """No later than computing the chunks would end; asking for them takes a part of that time."""
    disk, hanging = Shelf("disk"), Gated()
    hanging.name, hanging.hangs = "storage", hangs_at_once
    chain = chain_of(range(4))
    names = names_of(keys_of_rank(chain, 0))
    disk.held, hanging.held = set(names[:2]), {names[2]}
    now = asyncio.get_running_loop().time
    async with world(disk, hanging) as w:
        began = now()
        question = w.staging.stage("t", [chain], deadline_s=40.0, recompute_s=recompute_s)
        assert not w.staging.run(question).is_ready
        assert await w.settled("t") == Staged(True, (b"\2\2\0\0",))
        assert now() - began == pytest.approx(limit_s, abs=0.1)


@pytest.mark.virtual_time
@pytest.mark.parametrize("comes_after_s", [0.0, 0.05, 0.09, None])
@pytest.mark.parametrize("recompute_s", [None, 0.02])
async def test_chunks_that_are_on_their_way_are_waited_for_a_moment(
    comes_after_s: float | None, recompute_s: float | None
) -> None:
    """Two of four chunks come later, or never; nothing waits longer than they take to compute."""
    shelf, chain = Shelf(), chain_of(range(4))
    names = names_of(keys_of_rank(chain, 0))
    shelf.held.update(names[:2])
    loop = asyncio.get_running_loop()
    async with world(shelf) as w:
        began = loop.time()
        if comes_after_s is not None:
            loop.call_later(comes_after_s, lambda: shelf.held.update(names))
        question = w.staging.stage(
            "t", [chain], deadline_s=PATIENCE_S, recompute_s=recompute_s, source=""
        )
        assert not w.staging.run(question).is_ready
        limit_s = EXPECTED_S if recompute_s is None else 4 * recompute_s
        in_time = comes_after_s is not None and comes_after_s + AGAIN_S < limit_s
        assert (await w.settled("t")).tiers == (b"\2\2\2\2" if in_time else b"\2\2\0\0",)
        waited_s = loop.time() - began
        assert waited_s <= (AGAIN_S + comes_after_s if in_time else limit_s) + POLL_S  # type: ignore[operator]
        began = loop.time()
        w.stage("other", chain_of(range(9, 12)))
        await w.settled("other")
        assert loop.time() - began <= POLL_S, "nothing is known to be on its way"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_whole", [0, 1, 3])
@pytest.mark.parametrize("num_missing", [0, 1, 2])
async def test_a_tail_is_held_behind_its_whole_chain_and_costs_no_question_of_its_own(
    num_ranks: int, num_whole: int, num_missing: int
) -> None:
    """The last ones of the whole chunks are missing; the tail is there."""
    shelf = Shelf()
    whole = chain_of(range(num_whole), world_size=num_ranks)
    tail = chain_of([99], world_size=num_ranks, group=whole.group + TAIL)
    num_there = max(0, num_whole - num_missing)
    shelf.held.update(names_of(keys_by_chunk(whole))[: num_there * num_ranks])
    shelf.held.update(names_of(keys_by_chunk(tail)))
    async with world(shelf) as w:
        w.stage("t", whole, tail)
        staged = await w.settled("t")
        has_tail = num_there == num_whole
        assert staged.tiers == (
            b"\2" * num_there + bytes(num_whole - num_there),
            b"\2" if has_tail else b"\0",
        )
        assert shelf.num_asked == (num_whole + 1) * num_ranks
        assert w.room.used_bytes == (num_there + has_tail) * num_ranks * TAKEN_BYTES


async def test_cost_of_a_long_chain_is_that_of_its_held_part() -> None:
    shelf = Shelf()
    chain = chain_of(range(60_000))
    names = names_of(keys_of_rank(chain.part(0, 2000), 0))
    shelf.held.update(names[1000:])
    async with world(shelf, num_chunks=8192) as w:
        w.make_hot(names[:1000])
        assert w.stage("t", chain) == Staged(False, (b"\1" * 1000 + bytes(59_000),))
        assert (await w.settled("t")).tiers == (b"\1" * 1000 + b"\2" * 1000 + bytes(58_000),)
        assert shelf.num_asked <= 2 * staging_module.LIFT_BLOCK_KEYS


async def test_without_a_hot_tier_staged_chunks_are_hot_until_they_are_released() -> None:
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
    """Return the code of each chunk: of its slowest rank, 0 if one is missing. Places are 0
    (missing), 1 (hot), 2 (disk), 4 (remote).
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
def test_every_placement_of_chunks_is_staged_correctly(
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


BLOCK_KEYS = 4
NUM_CHUNKS = 12 * BLOCK_KEYS
LONG = chain_of(range(NUM_CHUNKS))
LONG_NAMES = names_of(keys_of_rank(LONG, 0))


@pytest.fixture
async def w(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """All chunks of `LONG` are hot; other tasks run after each block of them."""
    monkeypatch.setattr(staging_module, "HOT_BLOCK_KEYS", BLOCK_KEYS)
    async with world(num_chunks=4 * NUM_CHUNKS) as made:
        assert made.make_hot(LONG_NAMES) == NUM_CHUNKS
        yield made


async def stage_cooperatively(w: World, ticket: str, num_chunks: int = NUM_CHUNKS) -> Staged:
    chains = [LONG.part(0, num_chunks)]
    return await w.staging.run_cooperatively(w.staging.stage(ticket, chains, deadline_s=PATIENCE_S))


def num_held(w: World) -> int:
    """Return the number of references that are not the tier's own."""
    held = w.stack.hot.peek_many(LONG_NAMES)
    return sum(entry.num_holders for entry in held if not isinstance(entry, Miss))


async def turns_during(work: Awaitable[object]) -> int:
    """Return how often another task of this loop runs until the work is done."""
    num_turns = 0
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    await task
    return num_turns


async def test_other_tasks_run_while_many_chunks_are_taken_and_released(w: World) -> None:
    num_blocks = NUM_CHUNKS // BLOCK_KEYS
    assert await turns_during(stage_cooperatively(w, "t")) >= num_blocks
    assert num_held(w) == NUM_CHUNKS
    other = stage_cooperatively(w, "t", NUM_CHUNKS - 1)
    assert await turns_during(other) >= num_blocks, "it replaces the first"
    for release in (
        lambda: w.staging.unstage(["t"]),
        lambda: w.staging.expire(),
        lambda: w.staging.close(),
    ):
        await stage_cooperatively(w, "t")
        w.now += STAGE_LEASE_S
        assert await turns_during(w.staging.run_cooperatively(release())) >= num_blocks
        assert num_held(w) == 0


@pytest.mark.parametrize("num_steps", [1, 3, NUM_CHUNKS // BLOCK_KEYS - 1])
@pytest.mark.parametrize("ends", ["cancel", "close"])
async def test_client_that_leaves_meanwhile_is_promised_nothing(
    w: World, num_steps: int, ends: str
) -> None:
    staging = asyncio.ensure_future(stage_cooperatively(w, "t"))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    assert num_held(w) > 0
    if ends == "cancel":
        staging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await staging
    else:
        w.staging.run(w.staging.close())
        assert await staging == Staged(True, (bytes(NUM_CHUNKS),))
    assert (num_held(w), w.staging.num_tickets) == (0, 0)


async def test_chunk_removed_meanwhile_is_held_if_it_was_seen_and_missing_otherwise(
    w: World,
) -> None:
    staging = asyncio.ensure_future(stage_cooperatively(w, "t"))
    await asyncio.sleep(0)
    num_seen = 2 * BLOCK_KEYS
    w.stack.hot.remove_many([LONG_NAMES[0], LONG_NAMES[num_seen]])
    assert (await staging).tiers == (b"\1" * num_seen + bytes(NUM_CHUNKS - num_seen),)
    assert w.room.used_bytes == num_seen * TAKEN_BYTES
    w.staging.run(w.staging.unstage(["t"]))


async def test_number_of_tickets_includes_those_that_are_being_made(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "MAX_TICKETS", 2)
    answers = await asyncio.gather(*(stage_cooperatively(w, name) for name in "abc"))
    assert [answer.tiers[0].count(1) for answer in answers] == [NUM_CHUNKS, NUM_CHUNKS, 0]
    assert num_held(w) == 2 * NUM_CHUNKS


async def test_ranks_are_held_together_or_not_at_all() -> None:
    chain = chain_of(range(3), world_size=3)
    async with world(num_chunks=10) as w:
        w.make_hot(names_of(keys_by_chunk(chain)))
        assert w.stage("t", chain).tiers == (b"\1\0\0",)
        assert w.room.used_bytes == 3 * TAKEN_BYTES


@pytest.mark.parametrize(("name", "code"), [("peers", 3), ("AnotherTier", 5)])
async def test_code_of_a_chunk_is_that_of_its_slowest_tier(name: str, code: int) -> None:
    shelf = Shelf(name)
    chain = chain_of(range(2), world_size=2)
    async with world(shelf) as w:
        w.make_hot(names_of(keys_of_rank(chain, 0)))
        shelf.held.update(names_of(keys_of_rank(chain, 1)))
        w.stage("t", chain)
        assert (await w.settled("t")).tiers == (bytes([code, code]),)


async def test_chunks_lifted_for_a_ticket_that_is_gone_stay_hot_and_are_not_held() -> None:
    shelf = Gated()
    chain = chain_of(range(3))
    names = names_of(keys_of_rank(chain, 0))
    shelf.held.update(names)
    async with world(shelf) as w:
        w.stage("t", chain)
        await until(shelf.began.is_set)
        w.staging.run(w.staging.unstage(["t"]))
        shelf.may_continue.set()
        await until(lambda: all(w.stack.hot.contains_many(names)))
        assert w.room.used_bytes == 0
