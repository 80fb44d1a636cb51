"""Whatever is done to them, the embedded index, the one in Redis and the one in a cluster answer
the same, and as the rules say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmcache_lookup.index import EventBatch, EventsAck, IndexEvent, LeaseClaim, LookupIndex
from lmcache_lookup.index.embedded import EmbeddedIndex
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_servicekit.redis_client import RedisAccess

from tests.fixtures.redis_cluster import RedisClusterServers, running_cluster
from tests.fixtures.redis_server import RedisServer, running_redis

TENANTS = ("t1", "t2")
INSTANCES = ("a", "b")
TIERS = ("hot", "disk")
CHUNKS = [bytes([number, 0]) * 8 for number in (1, 2, 2 << 4)]
TTL_MS = 600_000

# One of each comes most often: steps that concern the same lease reach deeper states.
tenants = st.sampled_from([TENANTS[0], TENANTS[0], TENANTS[0], TENANTS[1]])
instances = st.sampled_from([INSTANCES[0], INSTANCES[0], INSTANCES[0], INSTANCES[1]])
incarnations = st.sampled_from([1, 1, 1, 2, 3])
events = st.builds(
    IndexEvent,
    st.sampled_from(["store", "remove"]),
    tenants,
    st.sampled_from(CHUNKS),
    st.sampled_from(TIERS),
    st.integers(0, 1 << 40),
)
steps = st.one_of(
    st.tuples(st.just("renew"), tenants, instances, incarnations),
    st.tuples(st.just("end"), tenants, instances, st.one_of(st.none(), incarnations)),
    *[
        st.tuples(
            st.just("apply"),
            tenants,
            instances,
            incarnations,
            st.integers(-3, 1),
            st.lists(events, max_size=4),
        )
    ]
    * 3,
    st.tuples(
        st.just("evict"), tenants, st.lists(st.sampled_from(CHUNKS), max_size=2, unique=True)
    ),
    st.tuples(st.just("clear"), tenants),
    st.tuples(st.just("sweep")),
)


@dataclass
class Lease:
    """One life of one instance."""

    incarnation: int
    next_sequence: int = 0
    resync: bool = False


@dataclass
class Model:
    """The rules, written down plainly."""

    leases: dict[tuple[str, str], Lease] = field(default_factory=dict)
    held: dict[tuple[str, bytes], dict[tuple[str, str, str], tuple[int, int]]] = field(
        default_factory=dict
    )

    def renew(self, owner: str, instance: str, incarnation: int) -> EventsAck:
        lease = self.leases.get((owner, instance))
        if lease is not None and incarnation < lease.incarnation:
            return EventsAck(0, True)
        if lease is None or incarnation > lease.incarnation:
            self._kill(owner, instance)
            lease = self.leases[owner, instance] = Lease(incarnation)
        return EventsAck(lease.next_sequence, lease.resync)

    def end(self, owner: str, instance: str, incarnation: int | None) -> bool:
        lease = self.leases.get((owner, instance))
        if lease is None or incarnation not in (None, lease.incarnation):
            return False
        self._kill(owner, instance)
        del self.leases[owner, instance]
        return True

    def apply(self, owner: str, batch: EventBatch) -> EventsAck:
        lease = self.leases.get((owner, batch.instance))
        if lease is None or lease.incarnation != batch.incarnation or lease.resync:
            return EventsAck(0, True)
        if batch.first_sequence > lease.next_sequence:
            return EventsAck(lease.next_sequence, True)
        for event in batch.events[lease.next_sequence - batch.first_sequence :]:
            entries = self.held.setdefault((event.tenant, event.chunk_id), {})
            place = (owner, batch.instance, event.tier)
            entries.pop(place, None)
            if event.op == "store":
                entries[place] = (lease.incarnation, event.size_bytes)
            lease.next_sequence += 1
        return EventsAck(lease.next_sequence, False)

    def holders(self, tenant: str, chunk_id: bytes) -> list[tuple[str, str, int]]:
        entries = self.held.get((tenant, chunk_id), {})
        return sorted((instance, tier, size) for (_, instance, tier), (_, size) in entries.items())

    def clear(self, tenant: str) -> None:
        self.held = {key: entries for key, entries in self.held.items() if key[0] != tenant}
        for (owner, _), lease in self.leases.items():
            lease.resync = lease.resync or owner == tenant

    def _kill(self, owner: str, instance: str) -> None:
        for entries in self.held.values():
            for place in [place for place in entries if place[:2] == (owner, instance)]:
                del entries[place]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as redis_server:
        yield redis_server


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisClusterServers]:
    with running_cluster(node_timeout_ms=10_000) as servers:
        yield servers


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=st.lists(steps, min_size=12, max_size=30))
def test_all_indexes_follow_the_model(
    server: RedisServer, cluster: RedisClusterServers, plan: Sequence[tuple[object, ...]]
) -> None:
    with server.client() as raw:
        raw.flushall()
    cluster.flush()
    asyncio.run(follow([server.url, cluster.url], plan))


async def follow(urls: Sequence[str], plan: Sequence[tuple[object, ...]]) -> None:
    model = Model()
    indexes: list[LookupIndex] = [
        EmbeddedIndex(1000, 100),
        *(RedisIndex(RedisAccess.parse(url), RedisIndexOptions(10, 10)) for url in urls),
    ]
    try:
        for step in plan:
            expected = await take(model, indexes, *step)
            assert expected == [expected[0]] * (1 + len(indexes)), step
            for tenant in TENANTS:
                for index in indexes:
                    found = await index.holders(tenant, CHUNKS)
                    seen = [
                        sorted(
                            (holder.instance, holder.tier, holder.size_bytes) for holder in holders
                        )
                        for holders in found
                    ]
                    assert seen == [model.holders(tenant, chunk_id) for chunk_id in CHUNKS], (
                        index.name,
                        step,
                    )
    finally:
        for index in indexes:
            await index.close()


async def take(
    model: Model, indexes: list[LookupIndex], kind: object, *arguments: object
) -> list[object]:
    """What the model and then each index answer to one step."""
    if kind == "renew":
        owner, instance, incarnation = arguments
        claim = LeaseClaim(instance, incarnation, "sidecar", TTL_MS)
        return [
            model.renew(owner, instance, incarnation),
            *[await index.renew(owner, claim) for index in indexes],
        ]
    if kind == "end":
        return [model.end(*arguments), *[await index.end(*arguments) for index in indexes]]
    if kind == "apply":
        owner, instance, incarnation, offset, batch_events = arguments
        lease = model.leases.get((owner, instance))
        first = max(0, (lease.next_sequence if lease else 0) + offset)
        batch = EventBatch(instance, incarnation, first, batch_events)
        return [model.apply(owner, batch), *[await index.apply(owner, batch) for index in indexes]]
    if kind == "evict":
        tenant, chunk_ids = arguments
        for chunk_id in chunk_ids:
            model.held.pop((tenant, chunk_id), None)
        for index in indexes:
            await index.evict(tenant, chunk_ids)
    elif kind == "clear":
        model.clear(*arguments)
        for index in indexes:
            await index.clear(*arguments)
    else:
        for index in indexes:
            await index.sweep()
    return [None] * (1 + len(indexes))
