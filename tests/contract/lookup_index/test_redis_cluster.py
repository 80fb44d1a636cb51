"""What only a cluster has to get right: batches that reach over several servers, and servers
that lose what was acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import pytest
import pytest_asyncio
from lmcache_core.errors import UnavailableError
from lmcache_lookup.index import EventBatch, EventsAck, IndexEvent, LeaseClaim
from lmcache_lookup.index import redis_scripts as scripts
from lmcache_lookup.index.packing import (
    LEASES_KEY,
    MARKS_KEY,
    NODES_KEY,
    NUM_BUCKETS,
    NUMBERS_KEY,
    TENANTS_KEY,
    VERSION_KEY,
    bucket_key,
    bucket_of,
    mark_key,
    pack_life,
    pack_number,
)
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_lookup.index.redis_writer import MASTERS_FRESH_S, MAX_CLOCK_SKEW_MS, incarnation_text
from lmcache_servicekit.redis_client import RedisAccess, RedisClient
from lmcache_servicekit.redis_cluster import create_redis_client, slot_of
from redis.exceptions import ResponseError

from tests.fixtures.redis_cluster import NUM_MASTERS, RedisClusterServers
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.waiting import at_least

T = TypeVar("T")
OPTIONS = RedisIndexOptions(read_timeout_s=30, write_timeout_s=30)
HURRIED = RedisIndexOptions(read_timeout_s=0.2, write_timeout_s=0.4)
CLAIM_S = HURRIED.write_timeout_s + MAX_CLOCK_SKEW_MS / 1000
CHUNKS = [bytes([place << 2]) * 16 for place in range(NUM_BUCKETS)]
"""One in each bucket."""


@pytest_asyncio.fixture
async def index(cluster: RedisClusterServers) -> AsyncIterator[RedisIndex]:
    cluster.flush()
    made = RedisIndex(RedisAccess.parse(cluster.url), OPTIONS)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def shards(cluster: RedisClusterServers) -> AsyncIterator[RedisClient]:
    made = create_redis_client(RedisAccess.parse(cluster.url), 2)
    yield made
    await made.close()


async def join(index: RedisIndex, instance: str = "a", incarnation: int = 1) -> EventsAck:
    return await index.renew("acme", LeaseClaim(instance, incarnation, "sidecar", 60_000))


def stores(chunk_ids: Sequence[bytes] = CHUNKS) -> list[IndexEvent]:
    return [IndexEvent("store", "acme", chunk_id, "hot", 5) for chunk_id in chunk_ids]


async def at_last(call: Callable[[], Awaitable[T]]) -> T:
    """What a call answers when it can be answered again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except UnavailableError:
                await at_least(0.05)


async def num_held(index: RedisIndex) -> int:
    return sum(bool(holders) for holders in await index.holders("acme", CHUNKS))


async def claim(
    shards: RedisClient, name: str, num_events: int = 1, hold_ms: int = 60_000, grace_ms: int = 1000
) -> list[int]:
    argv = ["acme/a", incarnation_text(1), 0, num_events, name, hold_ms, grace_ms, "acme"]
    answer: list[int] = await shards.run(scripts.CLAIM, [LEASES_KEY, TENANTS_KEY], argv)
    return answer


async def take(
    shards: RedisClient, chunk_id: bytes, number: int, ends_ms: int, incarnation: int = 1
) -> None:
    argv = [ends_ms, pack_number(number), 64, 1000, chunk_id, pack_life(incarnation, 5, "hot"), 1]
    await shards.run(scripts.TAKE, [bucket_key("acme", bucket_of(chunk_id))], argv)


def lease_server(cluster: RedisClusterServers) -> int:
    return cluster.place_of(LEASES_KEY)


def other_server(cluster: RedisClusterServers) -> int:
    return (lease_server(cluster) + 1) % NUM_MASTERS


def test_buckets_are_spread_evenly_over_any_number_of_masters() -> None:
    slots = [slot_of(bucket_key("acme", bucket)) for bucket in range(NUM_BUCKETS)]
    assert [slot // 256 for slot in slots] == list(range(64))


@pytest_asyncio.fixture
async def hurried(cluster: RedisClusterServers) -> AsyncIterator[RedisIndex]:
    made = RedisIndex(RedisAccess.parse(cluster.url), HURRIED)
    yield made
    await made.close()


@pytest.mark.realtime
async def test_a_batch_with_a_server_missing_is_not_taken_and_can_be_repeated(
    cluster: RedisClusterServers, index: RedisIndex, hurried: RedisIndex
) -> None:
    await join(index)
    silent = cluster.servers[other_server(cluster)]
    silent.pause()
    try:
        with pytest.raises(UnavailableError):
            await hurried.apply("acme", EventBatch("a", 1, 0, stores()))
        assert await join(index) == EventsAck(0, False)
        # Long enough for what still lies in the silent server's buffers to be late.
        await at_least(CLAIM_S)
    finally:
        silent.resume()
    assert 0 < await num_held(index) < NUM_BUCKETS
    assert await at_last(lambda: index.apply("acme", EventBatch("a", 1, 0, stores()))) == EventsAck(
        NUM_BUCKETS, False
    )
    assert await num_held(index) == NUM_BUCKETS


async def test_a_batch_that_a_server_refuses_can_be_repeated_at_once(
    cluster: RedisClusterServers, index: RedisIndex
) -> None:
    await join(index)
    with cluster.servers[other_server(cluster)].client() as raw:
        raw.config_set("maxmemory", "1")
        try:
            with pytest.raises(UnavailableError):
                await index.apply("acme", EventBatch("a", 1, 0, stores()))
            assert await join(index) == EventsAck(0, False)
        finally:
            raw.config_set("maxmemory", "0")
    assert await index.apply("acme", EventBatch("a", 1, 0, stores())) == EventsAck(
        NUM_BUCKETS, False
    )


async def test_an_instances_events_are_taken_by_one_replica_at_a_time(
    index: RedisIndex, shards: RedisClient
) -> None:
    await join(index)
    _, _, number, _ = await claim(shards, "x")
    assert number > 0
    assert await claim(shards, "x") == [0, 0, number, pytest.approx(0, abs=1 << 60)]
    with pytest.raises(UnavailableError, match="another replica"):
        await index.apply("acme", EventBatch("a", 1, 0, stores()))
    assert (await claim(shards, "y"))[2] == -1
    # No claim is on another life of the instance.
    assert await join(index, incarnation=2) == EventsAck(0, False)
    assert await index.apply("acme", EventBatch("a", 2, 0, stores())) == EventsAck(
        NUM_BUCKETS, False
    )


async def test_a_claim_is_taken_over_when_it_has_ended_for_all_clocks(
    index: RedisIndex, shards: RedisClient
) -> None:
    await join(index)
    assert (await claim(shards, "x", hold_ms=1, grace_ms=60_000))[2] > 0
    await at_least(0.05)
    assert (await claim(shards, "y", grace_ms=60_000))[2] == -1
    assert (await claim(shards, "y", grace_ms=10))[2] > 0
    assert await shards.run(
        scripts.SETTLE, [LEASES_KEY], ["acme/a", incarnation_text(1), "x", 1]
    ) == [0, 0, 0]
    assert await join(index) == EventsAck(0, False)
    assert await shards.run(
        scripts.SETTLE, [LEASES_KEY], ["acme/a", incarnation_text(1), "y", 1]
    ) == [1, 0, 1]


async def test_what_is_late_is_not_written(index: RedisIndex, shards: RedisClient) -> None:
    await join(index)
    _, _, number, ends_ms = await claim(shards, "x", hold_ms=60_000)
    await take(shards, CHUNKS[0], number, ends_ms)
    ends_ms -= 60_000
    await at_least(0.05)
    with pytest.raises(ResponseError, match="LATE"):
        await take(shards, CHUNKS[1], number, ends_ms)
    assert await num_held(index) == 1


async def test_an_earlier_life_does_not_write_over_a_later_one(
    index: RedisIndex, shards: RedisClient
) -> None:
    """Nor does the number of bits between them matter."""
    await join(index)
    _, _, number, ends_ms = await claim(shards, "x")
    for later in (2, 1 << 33, (1 << 33) + 1):
        await join(index, incarnation=later)
        await index.apply("acme", EventBatch("a", later, 0, stores(CHUNKS[:1])))
        await take(shards, CHUNKS[0], number, ends_ms)
        assert await num_held(index) == 1


async def test_a_lease_that_ended_meanwhile_settles_nothing(
    index: RedisIndex, shards: RedisClient
) -> None:
    await join(index)
    await claim(shards, "x")
    await index.end("acme", "a")
    assert await shards.run(
        scripts.SETTLE, [LEASES_KEY], ["acme/a", incarnation_text(1), "x", 1]
    ) == [0, 1, 1]


@pytest.mark.realtime
async def test_a_call_that_was_given_up_leaves_no_answer_for_the_next(
    cluster: RedisClusterServers, index: RedisIndex, hurried: RedisIndex
) -> None:
    await join(index)
    await index.apply("acme", EventBatch("a", 1, 0, stores(CHUNKS[::2])))
    assert await num_held(hurried) == NUM_BUCKETS // 2
    silent = cluster.servers[other_server(cluster)]
    silent.pause()
    try:
        for _ in range(3):
            with pytest.raises(UnavailableError):
                await hurried.holders("acme", CHUNKS)
    finally:
        silent.resume()
    await hurried.ping()  # three failures hold calls back
    for _ in range(20):
        found = await index.holders("acme", CHUNKS[::-1])
        assert [bool(holders) for holders in found] == [
            place % 2 == 1 for place in range(NUM_BUCKETS)
        ]
        found = await hurried.holders("acme", CHUNKS)
        assert [bool(holders) for holders in found] == [
            place % 2 == 0 for place in range(NUM_BUCKETS)
        ]


async def restart(server: RedisServer) -> None:
    """Back before anybody has missed it, with nothing in it; what was seen of the masters before
    is forgotten by then.
    """
    server.kill()
    await at_least(MASTERS_FRESH_S)
    server.start()


@pytest.mark.parametrize("which", [lease_server, other_server], ids=["of the leases", "of chunks"])
async def test_a_server_that_comes_back_empty_is_noticed_with_the_next_renewal(
    cluster: RedisClusterServers, index: RedisIndex, which: Callable[[RedisClusterServers], int]
) -> None:
    for incarnation, instance in ((1, "a"), (1, "b")):
        await join(index, instance, incarnation)
        await index.apply("acme", EventBatch(instance, incarnation, 0, stores()))
        assert await join(index, instance, incarnation) == EventsAck(NUM_BUCKETS, False)
    await restart(cluster.servers[which(cluster)])
    state = await at_last(lambda: join(index))
    # Either the answer asks for a resync, or the number shows that it is needed.
    assert state in (EventsAck(NUM_BUCKETS, True), EventsAck(0, False))
    assert await join(index, "b") in (EventsAck(NUM_BUCKETS, True), EventsAck(0, False))
    assert await join(index, "a", 2) == EventsAck(0, False)
    assert await at_last(lambda: index.apply("acme", EventBatch("a", 2, 0, stores()))) == EventsAck(
        NUM_BUCKETS, False
    )
    assert await num_held(index) == NUM_BUCKETS
    assert {
        holder.instance for holders in await index.holders("acme", CHUNKS) for holder in holders
    } <= {"a", "b"}
    await index.end("acme", "a")
    await index.end("acme", "b")


@pytest.mark.parametrize("which", [lease_server, other_server], ids=["of the leases", "of chunks"])
async def test_a_server_that_is_emptied_is_noticed_with_the_next_renewal(
    cluster: RedisClusterServers, index: RedisIndex, which: Callable[[RedisClusterServers], int]
) -> None:
    """By each instance, once, and whichever replica looks."""
    for instance in ("a", "b"):
        await join(index, instance)
        await index.apply("acme", EventBatch(instance, 1, 0, stores()))
    with cluster.servers[which(cluster)].client() as raw:
        raw.flushall()
    other = RedisIndex(RedisAccess.parse(cluster.url), OPTIONS)
    assert await join(other, "a") in (EventsAck(NUM_BUCKETS, True), EventsAck(0, False))
    assert await join(other, "b") in (EventsAck(NUM_BUCKETS, True), EventsAck(0, False))
    await at_least(MASTERS_FRESH_S)
    for replica, instance in ((other, "a"), (index, "b")):
        assert await join(replica, instance, 2) == EventsAck(0, False)
        assert await replica.apply("acme", EventBatch(instance, 2, 0, stores())) == EventsAck(
            NUM_BUCKETS, False
        )
        assert await join(replica, instance, 2) == EventsAck(NUM_BUCKETS, False)
    assert [len(holders) for holders in await index.holders("acme", CHUNKS)] == [2] * NUM_BUCKETS
    await other.close()


async def test_an_older_look_asks_nobody_to_announce_again(
    index: RedisIndex, shards: RedisClient
) -> None:
    """Replicas look at different times; what one saw before a server was emptied may reach the
    leases after what another saw.
    """

    async def renew(marks: str) -> list[int]:
        argv = ["acme/a", incarnation_text(1), "sidecar", 60_000, 8, 0, "", marks, 8]
        answer: list[int] = await shards.run(
            scripts.RENEW, [LEASES_KEY, VERSION_KEY, NUMBERS_KEY, NODES_KEY, MARKS_KEY], argv
        )
        return answer

    assert await renew("1700000000001,1700000000001") == [0, 0, 1]
    assert await renew("1700000000001,1700000000000") == [0, 0, 1]
    assert await renew("") == [0, 0, 1]
    assert await renew("1700000000001,1700000000002") == [0, 1, 1]


async def test_what_a_lost_lease_left_behind_is_nobody_elses(
    cluster: RedisClusterServers, index: RedisIndex
) -> None:
    """Entries on other servers outlive the table that said whose they are."""
    await join(index, "a")
    await index.apply("acme", EventBatch("a", 1, 0, stores()))
    await restart(cluster.servers[lease_server(cluster)])
    assert await at_last(lambda: join(index, "b")) == EventsAck(0, False)
    assert await at_last(lambda: num_held(index)) == 0
    assert await join(index, "a") == EventsAck(0, False)
    assert await num_held(index) == 0


async def test_a_cluster_that_cannot_be_reached_is_unavailability() -> None:
    index = RedisIndex(RedisAccess.parse("redis-cluster://127.0.0.1:1"), HURRIED)
    with pytest.raises(UnavailableError):
        await index.ping()
    with pytest.raises(UnavailableError):
        await index.holders("acme", CHUNKS)
    await index.close()


async def test_one_server_that_is_no_cluster_is_unavailability(server: RedisServer) -> None:
    index = RedisIndex(
        RedisAccess.parse(server.url.replace("redis://", "redis-cluster://")), HURRIED
    )
    with pytest.raises(UnavailableError):
        await index.ping()
    await index.close()


async def test_a_slot_that_moves_is_followed(
    cluster: RedisClusterServers, index: RedisIndex
) -> None:
    """While it moves, and afterwards."""
    await join(index)
    await index.apply("acme", EventBatch("a", 1, 0, stores()))
    key = bucket_key("acme", 0)
    slot, giver = slot_of(key), cluster.servers[cluster.place_of(key)]
    taker = cluster.servers[(cluster.place_of(key) + 1) % NUM_MASTERS]
    with giver.client() as old, taker.client() as new:
        ids = {client: client.execute_command("CLUSTER MYID").decode() for client in (old, new)}
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[old])
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[new])
        assert await num_held(index) == NUM_BUCKETS
        assert old.execute_command("MIGRATE", "127.0.0.1", taker.port, key, 0, 1000) == b"OK"
        assert await num_held(index) == NUM_BUCKETS
        await at_least(MASTERS_FRESH_S)
        assert await join(index) == EventsAck(NUM_BUCKETS, False)
        assert (
            old.execute_command("MIGRATE", "127.0.0.1", taker.port, mark_key(0), 0, 1000) == b"OK"
        )
        await at_least(MASTERS_FRESH_S)
        assert await join(index) == EventsAck(NUM_BUCKETS, False)
        more = stores([b"\0" + b"z" * 15])
        assert await index.apply("acme", EventBatch("a", 1, NUM_BUCKETS, more)) == EventsAck(
            NUM_BUCKETS + 1, False
        )
        for client in (new, old):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[new])
        assert await num_held(index) == NUM_BUCKETS
        assert await join(index) == EventsAck(NUM_BUCKETS + 1, False)
        assert (await index.holders("acme", [more[0].chunk_id]))[0]
        new.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[old])
        old.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[new])
        for moving in (key, mark_key(0)):
            assert new.execute_command("MIGRATE", "127.0.0.1", giver.port, moving, 0, 1000) == b"OK"
        for client in (old, new):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[old])
    assert await num_held(index) == NUM_BUCKETS
