"""Every index keeps the rules of `docs/protocols.md`, lookup: the embedded one, and Redis as one
server, with sentinels, as a cluster.

What an instance holds, by its events, incarnations and the end of its lease, is compared with a
model in `tests/property/test_lookup_index_model.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import pytest
import pytest_asyncio
import redis
from lmcache_core.errors import CapacityError
from lmcache_core.lookup import InstanceKind
from lmcache_core.security import SHARED_OWNER
from lmcache_lookup.index import EventBatch, EventsAck, IndexEvent, LeaseClaim, LookupIndex
from lmcache_lookup.index.base import MAX_STORED_HOLDERS_PER_CHUNK
from lmcache_lookup.index.embedded import EmbeddedIndex
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_servicekit.redis_client import RedisAccess

from tests.fixtures.redis_cluster import NUM_MASTERS, RedisClusterServers
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.waiting import at_least

MAX_INSTANCES = 8
MAX_INSTANCES_PER_TENANT = 6
MAX_CHUNKS_PER_TENANT = 640
LONG_MS = 60_000
EXPIRES_MS = 600_000
TAKEN = EventsAck(0, False)
HOLDS_BACK = EventsAck(0, True)
OPTIONS = RedisIndexOptions(
    read_timeout_s=5,
    write_timeout_s=5,
    max_instances=MAX_INSTANCES,
    max_instances_per_tenant=MAX_INSTANCES_PER_TENANT,
    max_chunks_per_tenant=MAX_CHUNKS_PER_TENANT,
)


@pytest_asyncio.fixture(params=["embedded", "redis", "sentinel", "cluster"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[LookupIndex]:
    made: LookupIndex
    if request.param == "embedded":
        made = EmbeddedIndex(1000, MAX_INSTANCES, MAX_CHUNKS_PER_TENANT, MAX_INSTANCES_PER_TENANT)
    else:
        made = RedisIndex(RedisAccess.parse(emptied_redis(request)), OPTIONS)
    await made.open()
    yield made
    await made.close()


def emptied_redis(request: pytest.FixtureRequest) -> str:
    """The URL of the kind of Redis that the test asks for, with nothing in it."""
    if request.param == "cluster":
        cluster: RedisClusterServers = request.getfixturevalue("cluster")
        cluster.flush()
        return cluster.url
    watched = request.getfixturevalue("sentinels") if request.param == "sentinel" else None
    server: RedisServer = request.getfixturevalue("server") if watched is None else watched.master
    with server.client() as raw:
        raw.flushall()
    return server.url if watched is None else str(watched.url)


def raw_clients(request: pytest.FixtureRequest) -> list[redis.Redis]:
    """Clients of the servers below the index that the test has; none for the embedded one."""
    kind = request.node.callspec.params["index"]
    if kind == "cluster":
        return [
            server.client() for server in request.getfixturevalue("cluster").servers[:NUM_MASTERS]
        ]
    if kind == "sentinel":
        return [request.getfixturevalue("sentinels").master.client()]
    return [request.getfixturevalue("server").client()] if kind == "redis" else []


def chunk(number: int) -> bytes:
    """Ids that spread over buckets, with some in the same one."""
    return ((number % 7) << 122 | number).to_bytes(16, "big")


def event(
    number: int,
    op: Literal["store", "remove"] = "store",
    tier: str = "hot",
    tenant: str = "acme",
    size: int = 5,
) -> IndexEvent:
    return IndexEvent(op, tenant, chunk(number), tier, size if op == "store" else 0)


async def join(
    index: LookupIndex,
    instance: str,
    incarnation: int = 1,
    *,
    owner: str = "acme",
    ttl_ms: int = LONG_MS,
    kind: InstanceKind = "sidecar",
) -> EventsAck:
    return await index.renew(owner, LeaseClaim(instance, incarnation, kind, ttl_ms))


async def tell(
    index: LookupIndex,
    instance: str,
    *events: IndexEvent,
    first: int = 0,
    incarnation: int = 1,
    owner: str = "acme",
) -> EventsAck:
    return await index.apply(owner, EventBatch(instance, incarnation, first, events))


async def end_lease(index: LookupIndex, instance: str, incarnation: int = 1) -> None:
    """Let a lease run out."""
    await join(index, instance, incarnation, ttl_ms=1)
    await at_least(0.02)


async def held(index: LookupIndex, *numbers: int, tenant: str = "acme") -> list[list[str]]:
    """Names of holders, with the tier."""
    found = await index.holders(tenant, [chunk(number) for number in numbers])
    return [sorted(f"{holder.instance}/{holder.tier}" for holder in holders) for holders in found]


async def test_ping(index: LookupIndex) -> None:
    await index.ping()


async def test_tenants_are_listed(index: LookupIndex) -> None:
    await join(index, "a")
    assert await index.tenants() == []
    await tell(
        index, "a", event(1, tenant="rival"), event(2, tenant="acme"), event(3, tenant="rival")
    )
    assert await index.tenants() == ["acme", "rival"]


async def test_incarnations_differ_in_their_last_digit(index: LookupIndex) -> None:
    """They are nanoseconds, and larger than a double can tell apart."""
    await join(index, "a", 1_800_000_000_000_000_000)
    await tell(index, "a", event(1), incarnation=1_800_000_000_000_000_000)
    assert await join(index, "a", 1_799_999_999_999_999_999) == HOLDS_BACK
    assert (
        await tell(index, "a", event(2), first=1, incarnation=1_800_000_000_000_000_001)
        == HOLDS_BACK
    )
    assert await join(index, "a", 1_800_000_000_000_000_001) == TAKEN
    assert await held(index, 1) == [[]]


async def test_when_a_lease_runs_out_its_holdings_vanish(index: LookupIndex) -> None:
    await join(index, "a")
    await join(index, "b")
    await tell(index, "a", event(1))
    await tell(index, "b", event(1))
    await end_lease(index, "a")  # before what is held is read: replicas remember leases
    assert await held(index, 1) == [["b/hot"]]
    assert await tell(index, "a", event(2), first=1) == HOLDS_BACK


async def test_a_lease_that_ran_out_begins_anew(index: LookupIndex) -> None:
    await join(index, "a")
    await tell(index, "a", event(1))
    await end_lease(index, "a")
    assert await join(index, "a") == TAKEN
    assert await held(index, 1) == [[]]
    assert (await join(index, "a", 0)).resync


async def test_an_incarnation_below_one_that_ran_out_is_taken_as_it_is(index: LookupIndex) -> None:
    await join(index, "a", 9)
    await tell(index, "a", event(1), event(2), incarnation=9)
    await end_lease(index, "a", 9)
    assert await join(index, "a", 3) == TAKEN
    assert await tell(index, "a", event(1), incarnation=3) == EventsAck(1, False)
    assert await held(index, 1, 2) == [["a/hot"], []]


async def test_a_renewal_keeps_holdings_alive(index: LookupIndex) -> None:
    await join(index, "a", ttl_ms=LONG_MS // 2)
    await tell(index, "a", event(1))
    await join(index, "a")
    [status] = await index.instances("acme")
    assert status.expires_in_ms > LONG_MS // 2
    assert await held(index, 1) == [["a/hot"]]


async def test_live_leases_are_listed_by_owner(index: LookupIndex) -> None:
    await join(index, "b", 3)
    await join(index, "a")
    await join(index, "c", owner="rival")
    await join(index, "d", ttl_ms=1)
    await tell(index, "a", event(1))
    await at_least(0.02)
    found = await index.instances("acme")
    assert [(status.instance, status.incarnation, status.next_sequence) for status in found] == [
        ("a", 1, 1),
        ("b", 3, 0),
    ]
    assert 0 < found[0].expires_in_ms <= LONG_MS


async def test_instances_are_bounded_and_dead_ones_make_room(index: LookupIndex) -> None:
    await join(index, "short")
    for number in range(MAX_INSTANCES - 1):
        await join(index, f"long-{number}", owner="acme" if number < 4 else "rival")
    with pytest.raises(CapacityError, match="max_instances="):
        await join(index, "late")
    await join(index, "long-0")
    await end_lease(index, "short")
    assert await join(index, "late") == TAKEN


async def test_a_tenant_does_not_take_the_places_of_others(index: LookupIndex) -> None:
    await join(index, "short")
    for number in range(MAX_INSTANCES_PER_TENANT - 1):
        await join(index, f"long-{number}")
    with pytest.raises(CapacityError, match="max_instances_per_tenant="):
        await join(index, "late")
    await join(index, "long-0")
    assert await join(index, "a", owner="acm") == TAKEN
    await end_lease(index, "short")
    assert await join(index, "late") == TAKEN


async def test_tenants_do_not_take_the_places_of_storage_servers(index: LookupIndex) -> None:
    for number in range(MAX_INSTANCES):
        await join(index, f"long-{number}", owner="acme" if number < 4 else "rival")
    with pytest.raises(CapacityError, match="max_instances="):
        await join(index, "late", owner="third")
    for number in range(MAX_INSTANCES_PER_TENANT):
        assert await join(index, f"st-{number}", owner=SHARED_OWNER, kind="storage") == TAKEN
    with pytest.raises(CapacityError, match="max_instances_per_tenant="):
        await join(index, "late", owner=SHARED_OWNER, kind="storage")


async def test_lease_of_a_tenant_does_not_touch_a_shared_one(index: LookupIndex) -> None:
    await join(index, "st", 7, owner=SHARED_OWNER, kind="storage")
    await tell(index, "st", event(1), event(2, tenant="rival"), owner=SHARED_OWNER, incarnation=7)
    assert await join(index, "st", (1 << 63) - 1) == TAKEN
    assert (await tell(index, "st", event(1, "remove"), incarnation=7)).resync
    assert await index.end("acme", "st")
    assert [await held(index, 1), await held(index, 2, tenant="rival")] == [[["st/hot"]]] * 2
    assert await join(index, "st", 7, owner=SHARED_OWNER, kind="storage") == EventsAck(2, False)
    assert [entry.instance for entry in await index.instances(SHARED_OWNER)] == ["st"]
    for owner in ("acme", "rival"):
        assert await index.instances(owner) == []
        assert (await index.stats(owner)).num_instances == 1


async def test_renewal_says_what_kind_the_instance_is(index: LookupIndex) -> None:
    await join(index, "a", kind="storage")
    await tell(index, "a", event(1))
    assert (await index.holders("acme", [chunk(1)]))[0][0].kind == "storage"
    await join(index, "a", kind="sidecar")
    assert (await index.holders("acme", [chunk(1)]))[0][0].kind == "sidecar"
    assert [entry.kind for entry in await index.instances("acme")] == ["sidecar"]


async def test_a_tenant_with_too_many_chunks_forgets_its_own(index: LookupIndex) -> None:
    await join(index, "a")
    await join(index, "b", owner="rival")
    rivals = [
        hashlib.sha256(b"%d" % number).digest()[:16] for number in range(2 * MAX_CHUNKS_PER_TENANT)
    ]
    await tell(index, "a", *(event(number) for number in range(40)))
    for first in range(0, len(rivals), 320):
        batch = [
            IndexEvent("store", "rival", chunk_id, "hot", 5)
            for chunk_id in rivals[first : first + 320]
        ]
        await tell(index, "b", *batch, first=first, owner="rival")
    assert all(await held(index, *range(40)))
    num_kept = sum(map(bool, await index.holders("rival", rivals)))
    assert 0.9 * MAX_CHUNKS_PER_TENANT < num_kept <= MAX_CHUNKS_PER_TENANT
    assert (await index.stats("rival")).num_chunks == num_kept
    assert (await index.holders("rival", rivals[-1:]))[0], "what comes last is kept"


IN_EVERY_BUCKET = 64
BUCKET_HOLDERS = MAX_CHUNKS_PER_TENANT // IN_EVERY_BUCKET


def one_in_each_bucket(number: int, tier: str = "memory") -> list[IndexEvent]:
    return [
        IndexEvent("store", "acme", bytes([bucket << 2, number]) * 8, tier, 5)
        for bucket in range(IN_EVERY_BUCKET)
    ]


def ids_of(events: Sequence[IndexEvent]) -> list[bytes]:
    return list(dict.fromkeys(event.chunk_id for event in events))


async def test_bound_counts_each_holder_of_a_chunk(index: LookupIndex) -> None:
    """Whatever a client calls its tiers and instances."""
    await join(index, "a")
    events = [
        event
        for number in range(BUCKET_HOLDERS)
        for tier in range(5)
        for event in one_in_each_bucket(number, f"t{tier}")
    ]
    for first in range(0, len(events), 160):
        await tell(index, "a", *events[first : first + 160], first=first)
    found = await index.holders("acme", ids_of(events))
    assert 0.5 * MAX_CHUNKS_PER_TENANT < sum(map(len, found)) <= MAX_CHUNKS_PER_TENANT
    assert (await index.stats("acme")).num_chunks == sum(map(bool, found))
    assert all(await index.holders("acme", ids_of(events[-64:]))), "what comes last is kept"
    assert index.num_dropped >= len(found) - sum(map(bool, found)) > 0


async def test_places_of_removed_holders_are_free_again(index: LookupIndex) -> None:
    """However they were removed: by events, evicted, cleared, or swept after their lease."""
    await join(index, "a")
    first = 0

    async def fill() -> None:
        nonlocal first
        for number in range(BUCKET_HOLDERS // 2):
            for tier in ("memory", "disk"):
                await tell(index, "a", *one_in_each_bucket(number, tier), first=first)
                first += IN_EVERY_BUCKET

    await fill()
    ids = ids_of(
        [event for number in range(BUCKET_HOLDERS // 2) for event in one_in_each_bucket(number)]
    )
    for chunk_id in ids:
        gone = [IndexEvent("remove", "acme", chunk_id, tier, 0) for tier in ("disk", "memory")]
        await tell(index, "a", *gone, first=first)
        first += 2
    assert not any(await index.holders("acme", ids))
    await fill()
    assert await index.evict("acme", ids) == len(ids)
    await fill()
    await index.end("acme", "a")
    await join(index, "a")
    for _ in range(32):
        await index.sweep()
    first = 0
    await fill()
    await index.clear("acme")
    await join(index, "a", 2)
    for number in range(BUCKET_HOLDERS):
        await tell(
            index,
            "a",
            *one_in_each_bucket(number),
            first=number * IN_EVERY_BUCKET,
            incarnation=2,
        )
    assert (await index.stats("acme")).num_chunks == MAX_CHUNKS_PER_TENANT
    assert index.num_dropped == 0


@pytest.mark.parametrize("is_dead_older", [True, False])
async def test_full_index_loses_dead_holders_before_live_ones(
    index: LookupIndex, is_dead_older: bool
) -> None:
    half = BUCKET_HOLDERS // 2
    dead = [event for number in range(half) for event in one_in_each_bucket(number)]
    live = [event for number in range(half, 2 * half) for event in one_in_each_bucket(number)]
    for instance, events in [("dead", dead), ("live", live)][:: 1 if is_dead_older else -1]:
        await join(index, instance)
        await tell(index, instance, *events)
    await index.end("acme", "dead")
    more = [event for number in range(100, 100 + half) for event in one_in_each_bucket(number)]
    await tell(index, "live", *more, first=len(live))
    assert all(await index.holders("acme", ids_of(live + more)))
    assert index.num_dropped == 0
    await tell(index, "live", *one_in_each_bucket(200), first=len(live + more))
    assert index.num_dropped == IN_EVERY_BUCKET
    assert all(await index.holders("acme", ids_of(one_in_each_bucket(200))))
    assert (await index.stats("acme")).num_chunks == MAX_CHUNKS_PER_TENANT


async def test_what_is_held_is_known_as_long_as_its_lease_lives(
    request: pytest.FixtureRequest, index: LookupIndex
) -> None:
    """However long nothing is stored or removed."""
    await join(index, "a")
    await tell(index, "a", *(event(number) for number in range(64)))
    for raw in raw_clients(request):
        with raw:
            assert [key for key in raw.scan_iter("lmc2:{b:*}:acme") if raw.pttl(key) != -1] == []
            # As a release before this one left them.
            for key in raw.scan_iter("lmc2:{b:*}:acme"):
                raw.pexpire(key, EXPIRES_MS)
    for _ in range(32):
        await index.sweep()
    for raw in raw_clients(request):
        with raw:
            assert [key for key in raw.scan_iter("lmc2:{b:*}:acme") if raw.pttl(key) != -1] == []
    assert all(await held(index, *range(64)))


async def test_holders_of_a_chunk_are_bounded(index: LookupIndex) -> None:
    await join(index, "a")
    await tell(
        index,
        "a",
        *(event(1, tier=f"t{number}") for number in range(MAX_STORED_HOLDERS_PER_CHUNK + 1)),
    )
    [tiers] = await held(index, 1)
    assert len(tiers) == MAX_STORED_HOLDERS_PER_CHUNK
    assert "a/t0" not in tiers


async def test_eviction_forgets_chunks_of_one_tenant(index: LookupIndex) -> None:
    await join(index, "a")
    await tell(index, "a", event(1), event(2), event(1, tenant="rival"))
    assert await index.evict("acme", [chunk(1), chunk(3)]) == 1
    assert await index.evict("acme", []) == 0
    assert await held(index, 1, 2) == [[], ["a/hot"]]
    assert await held(index, 1, tenant="rival") == [["a/hot"]]


async def test_clearing_asks_storage_servers_that_hold_chunks_of_all_tenants(
    index: LookupIndex,
) -> None:
    await join(index, "s", owner="ops", kind="storage")
    await tell(index, "s", event(1), event(2, tenant="rival"), owner="ops")
    await index.clear("acme")
    assert (await join(index, "s", owner="ops", kind="storage")).resync
    assert await join(index, "s", 2, owner="ops", kind="storage") == TAKEN
    await tell(index, "s", event(1), incarnation=2, owner="ops")
    assert await held(index, 1) == [["s/hot"]]


async def test_clearing_asks_all_shared_instances(index: LookupIndex) -> None:
    """A sidecar with an admin's token may hold chunks of any tenant."""
    await join(index, "a", owner=SHARED_OWNER)
    await tell(index, "a", event(1), owner=SHARED_OWNER)
    await index.clear("acme")
    assert await held(index, 1) == [[]]
    assert (await join(index, "a", owner=SHARED_OWNER)).resync


async def test_sweeping_clears_what_is_dead_and_nothing_else(index: LookupIndex) -> None:
    await join(index, "a", 1)
    await join(index, "b")
    await tell(index, "a", *(event(number) for number in range(10)))
    await tell(index, "b", *(event(number) for number in range(5)))
    await join(index, "a", 2)
    await tell(index, "a", event(20), incarnation=2)
    assert (await index.stats("acme")).num_chunks == 11
    num_swept = sum([await index.sweep() for _ in range(32)])
    assert num_swept == 10
    stats = await index.stats("acme")
    assert (stats.num_chunks, stats.num_instances) == (6, 2)
    assert await held(index, 1, 7, 20) == [["b/hot"], [], ["a/hot"]]
