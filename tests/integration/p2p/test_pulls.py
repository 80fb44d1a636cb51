"""Pulls from several peers over real sockets: failed over, and never a partial chunk."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from lmcache_core.lookup.messages import Holder, LookupAnswer
from lmcache_core.p2p import BrokerClient
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.expected import EXPECTED_FROM
from lmcache_core.storage.peer import LISTED_S, LOCATED_S, P2PBackend

from tests.fixtures.peers import Town, town
from tests.fixtures.wire import until
from tests.suites.chunks import make_key, make_payload

NAMES = [f"chunk-{i}" for i in range(40)]


pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def world() -> AsyncIterator[Town]:
    async with town() as running:
        yield running


def taken(results: Sequence[Result], names: Sequence[str] = NAMES) -> list[MissReason | None]:
    """Why each is missing; what is there is compared with what it must be, and given back."""
    found: list[MissReason | None] = []
    for name, result in zip(names, results, strict=True):
        if isinstance(result, Miss):
            found.append(result.reason)
            continue
        assert isinstance(result, Chunk)
        assert result.key == make_key(name)
        assert bytes(result.memory.byte_array) == make_payload(name), (
            f"{name} is not what it must be"
        )
        result.release()
        found.append(None)
    return found


ALL = [None] * len(NAMES)


class CountingBroker:
    """Counts how often it is asked for a list."""

    def __init__(self, inner: BrokerClient) -> None:
        self._inner = inner
        self.num_lists = 0

    async def peers(self) -> object:
        self.num_lists += 1
        return await self._inner.peers()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_a_hanging_peer_is_left_for_a_second_holder(world: Town) -> None:
    await world.add("a", NAMES)
    await world.add("b", NAMES, load=0.9)
    assert taken(await world.pull(NAMES[:1], ["a"]), NAMES[:1]) == [None], "there is a connection"
    world.proxies["a"].flows.clear()
    assert taken(await world.pull(NAMES, ["a", "b"], timeout_s=4.0)) == ALL
    figures = world.parts.figures
    assert (figures.pulls, figures.failed_pulls, figures.failed_over_chunks) == (3, 1, len(NAMES))


@pytest.mark.realtime
async def test_a_pull_that_outlives_its_ticket_renews_it() -> None:
    """On a line so slow that the pull takes several lives of a ticket."""
    key = f"k1:{base64.b64encode(b'k' * 32).decode()}"
    names = [f"chunk-{i}" for i in range(100)]
    async with town(ticket_key=key, ticket_ttl_ms=400, max_pulls_per_peer=1) as world:
        await world.add("a", names, bytes_per_s=100_000)
        began = asyncio.get_running_loop().time()
        pulling = asyncio.create_task(world.pull(names, ["a"], timeout_s=30.0))
        counts = set()
        while not pulling.done():
            seen = {peer.num_pulls for peer in await world.broker.peers()}
            if 0 < world.parts.figures.pulled_chunks < len(names):
                counts |= seen
            await asyncio.sleep(0.05)
        assert taken(await pulling, names) == [None] * len(names)
        assert asyncio.get_running_loop().time() - began > 1.0
        assert counts == {1}, "it counts against its peer throughout"
        figures = world.parts.figures
        assert (figures.pulls, figures.failed_pulls, figures.failed_over_chunks) == (1, 0, 0)
        assert figures.renewed_pulls >= 2
        assert [peer.num_pulls for peer in await world.broker.peers()] == [0]


async def test_the_rest_of_a_cut_pull_comes_from_another_peer(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=200_000)
    await world.add("b", NAMES, load=0.9)
    pulling = asyncio.create_task(world.pull(NAMES, ["a", "b"], timeout_s=30.0))
    await until(lambda: world.proxies["a"].num_passed >= 20_000)
    await world.proxies["a"].close()
    assert taken(await pulling) == ALL
    figures = world.parts.figures
    assert figures.failed_pulls == 1
    assert 0 < figures.failed_over_chunks < len(NAMES), (
        "what had come whole was not asked for again"
    )


async def test_without_another_holder_the_rest_is_a_miss(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=200_000)
    pulling = asyncio.create_task(world.pull(NAMES, ["a"], timeout_s=30.0))
    await until(lambda: world.parts.figures.pulled_chunks >= 4)
    await world.proxies["a"].close()
    found = taken(await pulling)
    assert 4 <= found.count(None) < len(NAMES)
    assert set(found) == {None, MissReason.UNAVAILABLE}


async def test_a_hanging_peer_is_given_up_before_the_deadline(world: Town) -> None:
    await world.add("a", NAMES)
    assert taken(await world.pull(NAMES[:1], ["a"]), NAMES[:1]) == [None], "there is a connection"
    world.proxies["a"].flows.clear()
    found = taken(await world.pull(NAMES, ["a"], timeout_s=4.0))
    assert set(found) == {MissReason.UNAVAILABLE}, "given up before the deadline"
    world.proxies["a"].flows.set()
    assert None not in taken(await world.pull(NAMES, ["a"], timeout_s=1.0)), (
        "it is not asked for a while"
    )


async def test_damaged_records_come_from_the_next_holder(world: Town) -> None:
    await world.add("a", NAMES)
    await world.add("b", NAMES, load=0.9)
    world.stores["a"].tampered[make_key(NAMES[3])] = b"not a record at all" * 10
    assert taken(await world.pull(NAMES, ["a", "b"], timeout_s=5.0)) == ALL
    assert world.parts.figures.corrupt_chunks == 1


async def test_a_cancelled_pull_releases_its_memory(world: Town) -> None:
    await world.add("a", NAMES, bytes_per_s=200_000)
    pulling = asyncio.create_task(world.pull(NAMES, ["a"], timeout_s=30.0))
    await until(lambda: world.parts.figures.pulled_chunks >= 4)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    await world.arena.until_empty()


class UnknowingLookup:
    """Knows of no chunk (yet)."""

    async def lookup(self, chunk_ids: Sequence[bytes], exclude: Sequence[str]) -> LookupAnswer:
        return LookupAnswer(0, [])


class KnowingLookup:
    """Says that one instance has everything."""

    def __init__(self, instance: str) -> None:
        self._holders = [Holder(instance, "sidecar", "memory", 1000)]
        self.num_asked = 0

    async def lookup(self, chunk_ids: Sequence[bytes], exclude: Sequence[str]) -> LookupAnswer:
        self.num_asked += 1
        return LookupAnswer(len(chunk_ids), [self._holders] * len(chunk_ids))


@pytest.mark.parametrize("source", ["a", "127.0.0.1"])
async def test_an_instance_that_is_to_have_chunks_is_asked_before_lookup_knows(
    world: Town, source: str
) -> None:
    await world.add("a", NAMES)
    tier = P2PBackend("me", UnknowingLookup(), world.broker, world.pool)  # type: ignore[arg-type]
    keys = [make_key(name) for name in NAMES]
    assert await tier.batched_contains(keys) == [False] * len(keys)
    EXPECTED_FROM.set(source)
    assert await tier.batched_contains(keys) == [True] * len(keys)
    assert taken(await tier.batched_get(keys, world.arena)) == ALL
    await tier.close()


async def test_chunks_that_were_just_located_are_not_looked_up_again(world: Town) -> None:
    await world.add("a", NAMES)
    lookup, now = KnowingLookup("a"), asyncio.get_running_loop().time
    tier = P2PBackend("me", lookup, world.broker, world.pool)  # type: ignore[arg-type]
    keys = [make_key(name) for name in NAMES]
    for asked, wait_s, num_lookups in (
        (keys, 0.0, 1),
        (keys[:3], 0.0, 1),
        (keys[1:], 0.0, 2),
        (keys, LOCATED_S, 2),
    ):
        assert all(await tier.batched_contains(keys))
        lookup.num_asked = 1
        until = now() + wait_s
        while now() < until:
            await asyncio.sleep(wait_s)
        results = await tier.batched_get(asked, world.arena)
        assert taken(results, [name for name in NAMES if make_key(name) in asked]) == [None] * len(
            asked
        )
        assert lookup.num_asked == num_lookups
        results = await tier.batched_get(asked, world.arena)
        assert lookup.num_asked == num_lookups + 1, "once"
        taken(results, [name for name in NAMES if make_key(name) in asked])
    await tier.close()


@pytest.mark.parametrize("source", ["me", "stranger", "127.0.0.2", "10.0.0.1:65432", "b"])
async def test_nothing_but_a_peer_is_asked(world: Town, source: str) -> None:
    """Not an address that a client names, nor a storage server; the broker is asked once."""
    await world.add("a", NAMES)
    broker = CountingBroker(world.broker)
    await world.announce("me", world.proxies["a"].port)
    tier = P2PBackend("me", UnknowingLookup(), broker, world.pool)  # type: ignore[arg-type]
    keys = [make_key(name) for name in NAMES]
    EXPECTED_FROM.set(source)
    for _ in range(3):
        assert await tier.batched_contains(keys) == [False] * len(keys)
    assert broker.num_lists == 1
    await asyncio.sleep(LISTED_S)
    await world.announce("b", world.proxies["a"].port)
    assert await tier.batched_contains(keys) == [source == "b"] * len(keys)
    assert broker.num_lists == 2
    await tier.close()
