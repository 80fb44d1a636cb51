"""Pulls through movers: what they bring is verified, and whatever they fail at, lm:// brings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from lmcache_core.p2p import by_mover
from lmcache_core.record import MissReason

from tests.fixtures.model_mover import ModelMover
from tests.fixtures.peers import Town, town
from tests.fixtures.waiting import until
from tests.integration.p2p.test_pulls import taken
from tests.suites.chunks import make_key, make_payload

NAMES = [f"chunk-{i}" for i in range(24)]
ALL = [None] * len(NAMES)
SLOW = 1_000_000
"""Bytes a second over lm://: the mover is faster."""

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Town]:
    """Everyone has a mover."""
    async with town(movers_in=tmp_path) as running:
        yield running


def mover_of(world: Town, name: str) -> ModelMover:
    assert world.movers is not None
    return world.movers.of[name]


def num_reads(world: Town) -> int:
    """What was asked of our own mover."""
    return mover_of(world, "me").num_reads


async def connect(world: Town, *names: str) -> None:
    """Reach peers once, which tells what they understand."""
    for name in names:
        assert taken(await world.pull(NAMES[:1], [name]), NAMES[:1]) == [None]


async def pulled(world: Town, names: Sequence[str] = NAMES) -> list[MissReason | None]:
    return taken(await world.pull(names, ["a"], timeout_s=4.0), names)


async def test_chunks_come_by_mover_and_not_over_the_wire(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    passed = world.proxies["a"].num_passed
    assert await pulled(world) == ALL
    assert num_reads(world) > 0
    whole = sum(len(make_payload(name)) for name in NAMES)
    assert world.proxies["a"].num_passed - passed < whole, "heads alone"
    figures = world.parts.figures
    assert (figures.pulled_chunks, figures.failed_pulls) == (1 + len(NAMES), 0)


async def test_what_the_peer_does_not_hold_is_a_miss(world: Town) -> None:
    await world.add("a", NAMES[:3])
    await connect(world, "a")
    assert await pulled(world, NAMES[:5]) == [None] * 3 + [MissReason.NEVER_STORED] * 2
    assert num_reads(world) == 1


async def test_loans_end_with_the_read(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    life = mover_of(world, "a").life
    assert life is not None
    assert await pulled(world) == ALL
    await until(lambda: not life.is_serving)


async def test_loans_end_with_the_connection(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    mine, theirs = mover_of(world, "me"), mover_of(world, "a").life
    assert theirs is not None
    mine.is_stopped = True
    pulling = asyncio.create_task(pulled(world))
    await until(lambda: theirs.is_serving)
    await world.proxies["a"].close()
    async with asyncio.timeout(1.0):  # less than any loan lasts
        await until(lambda: not theirs.is_serving)
    mine.is_stopped = False
    await pulling


async def test_a_peer_without_a_mover_is_not_asked_for_loans_again(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW, has_mover=False)
    await connect(world, "a")
    assert await pulled(world) == ALL
    pulls = world.parts.mover
    assert pulls is not None
    assert num_reads(world) == 0
    assert not pulls.is_faster("a")
    await asyncio.sleep(by_mover.REST_S + 1.0)
    assert pulls.is_faster("a"), "it may have one by now"


@pytest.mark.parametrize("whose", ["me", "a"])
async def test_chunks_come_over_the_wire_while_a_mover_hangs(world: Town, whose: str) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    mover_of(world, whose).is_stopped = True
    assert await pulled(world) == ALL
    asked = num_reads(world)
    assert await pulled(world) == ALL
    assert num_reads(world) == asked, "it rests"
    assert world.parts.figures.failed_pulls == 0
    mover_of(world, whose).is_stopped = False
    await asyncio.sleep(by_mover.REST_S + 5.0)
    assert await pulled(world) == ALL
    assert num_reads(world) > asked, "and is tried again"


async def test_a_mover_that_goes_on_failing_is_tried_less_and_less(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    mover_of(world, "a").is_stopped = True
    tried = []
    for turn in range(8):  # as long as the peer is registered
        asked = num_reads(world)
        assert await pulled(world, NAMES[:1]) == [None]
        if num_reads(world) > asked:
            tried.append(turn)
        await asyncio.sleep(5.0)
    assert len(tried) == 3, tried
    mover_of(world, "a").is_stopped = False


@pytest.mark.parametrize("whose", ["me", "a"])
async def test_chunks_come_over_the_wire_when_a_mover_dies(world: Town, whose: str) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    mover = mover_of(world, whose)
    mover.is_stopped = True
    pulling = asyncio.create_task(pulled(world))
    await asyncio.sleep(0.1)
    mover.die()
    mover.is_stopped = False
    assert await pulling == ALL
    assert world.parts.figures.failed_pulls == 0


async def test_a_mover_that_has_started_again_is_read_from_at_once(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    assert await pulled(world) == ALL
    mover, pulls = mover_of(world, "a"), world.parts.mover
    assert pulls is not None
    first = mover.life
    mover.die()
    await until(lambda: mover.life not in (None, first))
    pulls.note("a", True, 1 << 40, 1e-3)  # it is the faster way
    assert await pulled(world) == ALL
    figures = pulls.stats()
    assert (figures["mover_chunks"], figures["failed_mover_reads"]) == (2 * len(NAMES), 0)


async def test_a_wrong_byte_is_noticed(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")

    def damage(data: memoryview) -> None:
        data[len(data) // 2] ^= 1

    mover_of(world, "me").damages = damage
    assert await pulled(world) == ALL
    assert num_reads(world) > 0


async def test_memory_that_a_hanging_mover_owns_comes_back_when_it_has_ended(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    mine = mover_of(world, "me")
    mine.is_stopped = True
    assert await pulled(world) == ALL
    assert world.arena.allocator.used_bytes > 0, "a stopped mover may still write"
    await until(lambda: world.arena.allocator.used_bytes == 0)
    assert mine.is_stopped, "its supervisor has killed it"
    mine.is_stopped = False


async def test_a_loan_ends_when_its_time_is_up(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    client = await world.pool.client(f"lm://127.0.0.1:{world.proxies['a'].port}")
    lent = await client.borrow([make_key(NAMES[0])], None)
    life = mover_of(world, "a").life
    assert life is not None
    await until(lambda: life.is_serving)
    assert lent.mover == life.blob
    await asyncio.sleep(60.0)
    await until(lambda: not life.is_serving)
    await client.give_back([1])  # of no effect


async def test_the_slower_way_is_taken_now_and_then(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=SLOW)
    await connect(world, "a")
    pulls = world.parts.mover
    assert pulls is not None
    for _ in range(100):
        pulls.note("a", True, 2 << 20, 1.0)
        pulls.note("a", False, 1 << 20, 1.0)
    ways = [pulls.is_faster("a") for _ in range(2 * by_mover.TRIED_EVERY)]
    assert ways.count(False) == 2
    pulls.note("a", False, 1 << 40, 1.0)
    ways = [pulls.is_faster("a") for _ in range(2 * by_mover.TRIED_EVERY)]
    assert ways.count(True) == 2


async def test_only_the_requester_of_a_ticket_borrows(tmp_path: Path) -> None:
    key = f"k1:{base64.b64encode(b'k' * 32).decode()}"
    async with town(ticket_key=key, movers_in=tmp_path) as world:
        await world.add("a", NAMES, bytes_per_s=SLOW)
        await connect(world, "a")
        assert await pulled(world) == ALL
        assert num_reads(world) > 0
        client = await world.pool.client(f"lm://127.0.0.1:{world.proxies['a'].port}")
        with pytest.raises(Exception, match="ticket"):
            await client.borrow([make_key(NAMES[0])], None)
        with pytest.raises(Exception, match="ticket"):
            await client.borrow([make_key(NAMES[0])], "v1.forged.ticket")
