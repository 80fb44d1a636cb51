"""What lies in Redis, seen past the index; and what the index makes of foreign, missing and lost
data.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partialmethod
from typing import Any

import pytest
import pytest_asyncio
import redis.exceptions
from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import Holder
from lmcache_lookup.index import EventBatch, IndexEvent, LeaseClaim, redis_scripts
from lmcache_lookup.index.packing import (
    NUM_BUCKETS,
    StoredHolder,
    bucket_key,
    bucket_of,
    pack_holder,
    unpack_holders,
)
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_lookup.index.redis_sweeper import MAX_BUCKETS_PER_STEP, SWEEP_PAGE_CHUNKS
from lmcache_servicekit.redis_client import CLIENT_ERRORS, RedisAccess, RedisClient

from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.waiting import until

CHUNK = bytes.fromhex("0a3f" + "11" * 14)
KEY = "lmc2:{b:02b0}:acme"


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        client.script_flush()
        yield client


@pytest_asyncio.fixture
async def index(server: RedisServer, raw: redis.Redis) -> AsyncIterator[RedisIndex]:
    made = RedisIndex(
        RedisAccess.parse(server.url), RedisIndexOptions(read_timeout_s=30, write_timeout_s=30)
    )
    await made.open()
    yield made
    await made.close()


def number_of(raw: redis.Redis, field: str = "acme/a") -> int:
    """The instance's, from its lease."""
    number: int = json.loads(raw.hget("lmc2:{i}:leases", field))[0]
    return number


async def put(index: RedisIndex, instance: str = "a", incarnation: int = 7) -> None:
    await index.renew("acme", LeaseClaim(instance, incarnation, "sidecar", 60_000))
    await index.apply(
        "acme", EventBatch(instance, incarnation, 0, [IndexEvent("store", "acme", CHUNK, "hot", 5)])
    )


def test_golden_bytes() -> None:
    holder = StoredHolder(1, 7, 5, "hot")
    assert (
        pack_holder(holder).hex()
        == "01000000" + "0700000000000000" + "0500000000000000" + "03" + "686f74"
    )
    assert list(unpack_holders(pack_holder(holder) * 2)) == [holder, holder]
    assert (bucket_of(CHUNK), bucket_key("acme", 0x02)) == (0x02, KEY)


async def test_a_store_lies_where_the_layout_says(index: RedisIndex, raw: redis.Redis) -> None:
    await put(index)
    number = number_of(raw)
    assert abs(number - raw.time()[0]) < 60
    assert raw.hgetall(KEY) == {CHUNK: pack_holder(StoredHolder(number, 7, 5, "hot"))}
    assert raw.ttl(KEY) == -1
    assert raw.smembers("lmc2:{i}:tenants") == {b"acme"}


async def test_what_another_replica_wrote_is_read(index: RedisIndex, raw: redis.Redis) -> None:
    await put(index)
    raw.hset(KEY, CHUNK, pack_holder(StoredHolder(number_of(raw), 7, 99, "disk")))
    assert await index.holders("acme", [CHUNK]) == [[Holder("a", "sidecar", "disk", 99)]]


@pytest.mark.parametrize("kind", ["store", "remove"])
async def test_an_event_of_an_earlier_life_leaves_a_later_one_alone(
    index: RedisIndex, raw: redis.Redis, kind: str
) -> None:
    """It was let in before the later life began, and arrives after that life's own events."""
    await put(index)
    later = pack_holder(StoredHolder(number_of(raw), 9, 5, "disk"))
    raw.hset(KEY, CHUNK, later)
    event = IndexEvent(kind, "acme", CHUNK, "hot", 5)  # type: ignore[arg-type]
    await index.apply("acme", EventBatch("a", 7, 1, [event]))
    assert raw.hget(KEY, CHUNK) == later


@pytest.mark.parametrize("kind", ["empty", "short", "cut", "other number", "long"])
async def test_foreign_bytes_hold_nothing(index: RedisIndex, raw: redis.Redis, kind: str) -> None:
    await put(index)
    ours = pack_holder(StoredHolder(number_of(raw), 7, 5, "hot"))
    others = pack_holder(StoredHolder(number_of(raw) + 1, 7, 5, "hot"))
    raw.hset(
        KEY,
        CHUNK,
        {
            "empty": b"",
            "short": b"\0",
            "cut": ours[:-1],
            "other number": others,
            "long": b"\xff" * 100,
        }[kind],
    )
    assert await index.holders("acme", [CHUNK]) == [[]]


async def test_a_bucket_of_another_type_holds_nothing_and_is_replaced(
    index: RedisIndex, raw: redis.Redis
) -> None:
    other = b"\xff" * 16
    await put(index)
    await index.apply("acme", EventBatch("a", 7, 1, [IndexEvent("store", "acme", other, "hot", 5)]))
    raw.set(KEY, b"text")
    assert [len(holders) for holders in await index.holders("acme", [CHUNK, other])] == [0, 1]
    assert (await index.stats("acme")).num_chunks == 1
    assert await index.evict("acme", [CHUNK]) == 0
    for _ in range(16):
        await index.sweep()
    assert not raw.exists(KEY)
    raw.set(KEY, b"text")
    again = EventBatch("a", 7, 2, [IndexEvent("store", "acme", CHUNK, "hot", 5)])
    assert (await index.apply("acme", again)).next_sequence == 3
    assert (await index.holders("acme", [CHUNK]))[0]


async def test_a_read_only_redis_with_buckets_of_an_earlier_release_is_swept() -> None:
    """Their time to live cannot be taken away then, which is no reason to call the index away."""
    with running_redis() as server, server.client() as raw:
        index = RedisIndex(
            RedisAccess.parse(server.url), RedisIndexOptions(read_timeout_s=30, write_timeout_s=30)
        )
        await put(index)
        raw.expire(KEY, 86_400)
        raw.replicaof("127.0.0.1", "1")
        for _ in range(2 * NUM_BUCKETS // MAX_BUCKETS_PER_STEP):
            assert await index.sweep() == 0
        assert (await index.holders("acme", [CHUNK]))[0]
        raw.replicaof("NO", "ONE")
        for _ in range(2 * NUM_BUCKETS // MAX_BUCKETS_PER_STEP):
            await index.sweep()
        assert raw.ttl(KEY) == -1
        await index.close()


async def test_sweeping_writes_nothing_where_nothing_is_dead(
    index: RedisIndex, raw: redis.Redis
) -> None:
    await put(index)
    raw.config_resetstat()
    for _ in range(2 * NUM_BUCKETS // MAX_BUCKETS_PER_STEP):
        await index.sweep()
    used = {name.removeprefix("cmdstat_") for name in raw.info("commandstats")}
    assert "hscan" in used
    assert used.isdisjoint({"persist", "unlink", "del", "hdel", "hset", "set"})


async def test_a_full_redis_is_swept_where_a_chunk_keeps_another_holder() -> None:
    """To write down who is left takes no more room than there was."""
    with running_redis() as server, server.client() as raw:
        index = RedisIndex(
            RedisAccess.parse(server.url), RedisIndexOptions(read_timeout_s=30, write_timeout_s=30)
        )
        await put(index, "a")
        await put(index, "b")
        await index.end("acme", "a")
        raw.config_set("maxmemory", "1")
        swept = [await index.sweep() for _ in range(2 * NUM_BUCKETS // MAX_BUCKETS_PER_STEP)]
        assert sum(swept) == 1
        assert [holder.instance for holder in (await index.holders("acme", [CHUNK]))[0]] == ["b"]
        await index.close()


FOREIGN_LEASES = {
    "no json": b"not json",
    "empty": b"",
    "not utf-8": b"\xff\xfe",
    "number": b"7",
    "object": b"{}",
    "null": b"null",
    "short": b"[1]",
    "nulls": b"[null,null,null,null,null,null]",
    "types": b'["1",7,"sidecar","x",0,0]',
    "deep": b"[" * 2000,
}


@pytest.mark.parametrize("value", FOREIGN_LEASES.values(), ids=FOREIGN_LEASES)
async def test_foreign_value_in_the_place_of_a_lease_is_replaced_and_costs_no_other(
    index: RedisIndex, raw: redis.Redis, value: bytes
) -> None:
    await put(index, "b")
    await put(index, "a")
    raw.hset("lmc2:{i}:leases", "acme/a", value)
    raw.set("lmc2:{i}:version", "another")  # so that the leases are read again
    assert [entry.instance for entry in await index.instances("acme")] == ["b"]
    assert [holder.instance for holder in (await index.holders("acme", [CHUNK]))[0]] == ["b"]
    assert not await index.end("acme", "a")
    stores = [IndexEvent("store", "acme", CHUNK, "hot", 5)]
    assert (await index.apply("acme", EventBatch("a", 7, 1, stores))).resync
    claim = LeaseClaim("b", 7, "sidecar", 60_000)
    assert (await index.renew("acme", claim)).next_sequence == 1
    await put(index, "a", 8)
    assert len((await index.holders("acme", [CHUNK]))[0]) == 2
    raw.hset("lmc2:{i}:leases", "acme/a", value)
    await index.clear("acme")
    assert (await index.renew("acme", claim)).resync


async def test_after_a_flush_old_entries_stay_dead_whoever_comes_first(
    index: RedisIndex, raw: redis.Redis
) -> None:
    await put(index, "a")
    assert (await index.holders("acme", [CHUNK]))[0]
    old = raw.hgetall(KEY)
    raw.flushall()
    assert await index.holders("acme", [CHUNK]) == [[]]
    await index.renew("acme", LeaseClaim("b", 8, "sidecar", 60_000))
    raw.hset(KEY, mapping=old)
    assert await index.holders("acme", [CHUNK]) == [[]]


async def test_two_replicas_agree_at_once(index: RedisIndex, server: RedisServer) -> None:
    other = RedisIndex(
        RedisAccess.parse(server.url), RedisIndexOptions(read_timeout_s=30, write_timeout_s=30)
    )
    await put(index)
    assert (await other.holders("acme", [CHUNK]))[0]
    await index.end("acme", "a")
    assert await other.holders("acme", [CHUNK]) == [[]]
    await other.close()


@pytest.mark.parametrize("num_done", [0, 1])
async def test_what_an_instance_announces_while_a_tenant_is_cleared_is_kept(
    index: RedisIndex, server: RedisServer, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    """Its heartbeat reaches another replica before the first or the second step of a clear."""
    other = RedisIndex(
        RedisAccess.parse(server.url), RedisIndexOptions(read_timeout_s=30, write_timeout_s=30)
    )
    chunks = [bytes([number << 2]) * 16 for number in range(NUM_BUCKETS)]
    stores = [IndexEvent("store", "acme", chunk_id, "hot", 5) for chunk_id in chunks]
    incarnation = 7
    num_calls = 0
    is_heartbeat = False

    async def heartbeat() -> None:
        nonlocal incarnation, is_heartbeat
        is_heartbeat = True
        claim = LeaseClaim("a", incarnation, "sidecar", 60_000)
        if (await other.renew("acme", claim)).resync:
            incarnation += 1
            await other.renew("acme", LeaseClaim("a", incarnation, "sidecar", 60_000))
            await other.apply("acme", EventBatch("a", incarnation, 0, stores))
        is_heartbeat = False

    async def step(client: RedisClient, call: Callable[..., Awaitable[Any]], *given: Any) -> Any:
        nonlocal num_calls
        if not is_heartbeat:
            if num_calls == num_done:
                await heartbeat()
            num_calls += 1
        return await call(client, *given)

    await other.renew("acme", LeaseClaim("a", incarnation, "sidecar", 60_000))
    await other.apply("acme", EventBatch("a", incarnation, 0, stores))
    with monkeypatch.context() as patch:
        patch.setattr(RedisClient, "many", partialmethod(step, RedisClient.many))
        await index.clear("acme")
    assert num_calls == 2
    await heartbeat()
    assert all(await other.holders("acme", chunks))
    await other.close()


async def test_clear_that_fails_in_the_middle_asks_all_the_same(
    index: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(index)

    failures = [ConnectionError("gone")]
    many = RedisClient.many

    async def fail_once(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return await many(*given)

    with monkeypatch.context() as patch:
        patch.setattr(RedisClient, "many", fail_once)
        with pytest.raises(UnavailableError):
            await index.clear("acme")
    assert (await index.renew("acme", LeaseClaim("a", 7, "sidecar", 60_000))).resync


async def test_scripts_that_redis_forgot_are_sent_again(
    index: RedisIndex, raw: redis.Redis
) -> None:
    await put(index)
    raw.script_flush()
    batch = EventBatch("a", 7, 1, [IndexEvent("remove", "acme", CHUNK, "hot", 0)])
    assert (await index.apply("acme", batch)).next_sequence == 2
    assert not raw.exists(KEY)


async def test_redis_without_room_takes_nothing_and_keeps_the_number(
    index: RedisIndex, raw: redis.Redis
) -> None:
    await put(index)
    raw.config_set("maxmemory", "1")
    batch = EventBatch("a", 7, 1, [IndexEvent("store", "acme", b"z" * 16, "hot", 5)])
    try:
        with pytest.raises(UnavailableError):
            await index.apply("acme", batch)
    finally:
        raw.config_set("maxmemory", "0")
    assert (await index.apply("acme", batch)).next_sequence == 2


async def test_a_redis_that_does_not_answer_costs_its_timeout_once() -> None:
    with running_redis() as server:
        index = RedisIndex(
            RedisAccess.parse(server.url),
            RedisIndexOptions(read_timeout_s=0.1, write_timeout_s=0.2),
        )
        await put(index)
        server.pause()
        with pytest.raises(UnavailableError):
            await index.holders("acme", [CHUNK])
        server.resume()

        async def is_found() -> bool:
            try:
                return bool((await index.holders("acme", [CHUNK]))[0])
            except UnavailableError:
                return False

        await until(is_found)
        await index.close()


def test_every_exception_of_the_client_library_is_mapped() -> None:
    """Left out: errors of optional features that the index does not use."""
    unused = {"ChildDeadlockedError", "IncorrectPolicyType"}
    kinds = [
        kind
        for _, kind in inspect.getmembers(redis.exceptions, inspect.isclass)
        if issubclass(kind, Exception)
    ]
    assert len(kinds) > 20
    assert not [
        kind
        for kind in kinds
        if not issubclass(kind, CLIENT_ERRORS) and kind.__name__ not in unused
    ]


async def test_a_large_bucket_is_swept_in_pages(index: RedisIndex, raw: redis.Redis) -> None:
    await index.renew("acme", LeaseClaim("a", 7, "sidecar", 60_000))
    chunk_ids = [b"\0" + number.to_bytes(15, "big") for number in range(4000)]
    for first in range(0, len(chunk_ids), 2000):
        events = [
            IndexEvent("store", "acme", chunk_id, "hot", 5)
            for chunk_id in chunk_ids[first : first + 2000]
        ]
        assert (
            await index.apply("acme", EventBatch("a", 7, first, events))
        ).next_sequence == first + 2000
    assert await index.sweep() == 0
    await index.end("acme", "a")
    swept = [await index.sweep() for _ in range(40)]
    assert sum(swept) == len(chunk_ids)
    assert max(swept) < 2 * SWEEP_PAGE_CHUNKS
    assert not raw.keys("lmc2:{b:*")


def test_full_bucket_is_trimmed_in_the_order_asked_for(raw: redis.Redis) -> None:
    ids = [bytes([at]) * 16 for at in range(9)]
    raw.hset("bucket", mapping=dict.fromkeys(ids, pack_holder(StoredHolder(7, 1, 5, "hot"))))
    for asked, left, is_full in ((ids[:2], ids[2:], 1), (ids, ids[6:], 0)):
        answer = raw.eval(redis_scripts.TRIM.text, 1, "bucket", 3, 17, *asked)
        assert answer == [is_full, len(ids) - len(left)]
        assert set(raw.hkeys("bucket")) == {*left, b"#at"}
        ids = left


async def test_connections_that_a_restart_has_cut_are_replaced() -> None:
    with running_redis() as server:
        index = RedisIndex(
            RedisAccess.parse(server.url), RedisIndexOptions(read_timeout_s=30, write_timeout_s=30)
        )
        await put(index)
        await asyncio.gather(*(index.holders("acme", [CHUNK]) for _ in range(8)))
        server.kill()
        server.start()
        # None of them is told that nothing is known: what Redis knows is nothing.
        assert (
            await asyncio.gather(*(index.holders("acme", [CHUNK]) for _ in range(8))) == [[[]]] * 8
        )
        await put(index)
        assert (await index.holders("acme", [CHUNK]))[0]
        await index.close()
