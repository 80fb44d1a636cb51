"""Redis' master is killed or stands still while instances report and are looked up, and what it
acknowledged last is lost.

Nothing wrong is said, nothing is unknown for long, and everything is right again soon.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import EventsAck, Holding, InstanceLease, InstanceReporter, ReporterTiming
from lmcache_lookup.index import EventBatch, IndexEvent, LeaseClaim, LookupIndex
from lmcache_lookup.index.packing import LEASES_KEY, bucket_key
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_servicekit.redis_client import RedisAccess
from lmcache_servicekit.redis_cluster import NUM_SLOTS, slot_of

from tests.fixtures.redis_cluster import NUM_MASTERS, running_cluster
from tests.fixtures.redis_sentinel import watched_redis
from tests.fixtures.redis_server import RedisServer

SEED = 20_261_121
TTL_S = 2.0
TIMING = ReporterTiming(ttl_ms=int(TTL_S * 1000), gather_s=0.0, retry_s=0.05, max_retry_s=0.5)
READ_TIMEOUT_S = 0.1
OPTIONS = RedisIndexOptions(read_timeout_s=READ_TIMEOUT_S, write_timeout_s=0.8)
NUM_INSTANCES = 4
NUM_CHUNKS = 400
LOAD_S = 0.5
LOST_S = 0.5
"""What was acknowledged in so long before the end is certainly lost."""
MOST_UNKNOWN_S = 12.0
"""One second until a master counts as failed, the vote, two seconds in which the new one answers
nothing yet; a busy machine.
"""
HEALING_S = 12.0
"""A heartbeat; a batch that was cut off, whose claim has to end for all clocks (2.8 s); the
pauses between tries; a busy machine.
"""


class ThroughIndex:
    """What a reporter asks of the lookup service, answered by an index, and by another one each
    time.
    """

    def __init__(self, indexes: list[LookupIndex]) -> None:
        self._given = itertools.cycle(indexes)
        self.is_cut = False

    @property
    def _index(self) -> LookupIndex:
        if self.is_cut:
            raise UnavailableError("the connection is cut")
        return next(self._given)

    async def renew_instance(
        self, instance: str, *, incarnation: int, kind: Any, ttl_ms: int
    ) -> InstanceLease:
        state = await self._index.renew("t", LeaseClaim(instance, incarnation, kind, ttl_ms))
        return InstanceLease(ttl_ms, state.next_sequence, state.resync)

    async def send_events(
        self, instance: str, *, incarnation: int, first_sequence: int, events: list[Any]
    ) -> EventsAck:
        taken = [
            IndexEvent(event.op, "t", event.chunk_id, event.tier, event.size_bytes)
            for event in events
        ]
        state = await self._index.apply(
            "t", EventBatch(instance, incarnation, first_sequence, taken)
        )
        return EventsAck(state.next_sequence, state.resync)

    async def end_instance(self, instance: str, *, incarnation: int | None = None) -> None:
        await self._index.end("t", instance, incarnation)


class Instance:
    """Stores and drops chunks all the time, and reports it."""

    def __init__(
        self, client: ThroughIndex, name: str, chunk_ids: list[bytes], chance: random.Random
    ) -> None:
        self.name = name
        self.held = dict.fromkeys(chance.sample(chunk_ids, len(chunk_ids) // 2), 5)
        self.ever_held = set(self.held)
        self._chunk_ids = chunk_ids
        self._chance = chance
        self.reporter = InstanceReporter(client, name, "sidecar", self._snapshot, TIMING)  # type: ignore[arg-type]

    def _snapshot(self) -> list[Holding]:
        return [Holding(chunk_id, "hot", size) for chunk_id, size in list(self.held.items())]

    async def work(self) -> None:
        while True:
            chunk_id = self._chance.choice(self._chunk_ids)
            if self.held.pop(chunk_id, None) is None:
                self.held[chunk_id] = 5
                self.ever_held.add(chunk_id)
                self.reporter.stored(chunk_id, "hot", 5)
            else:
                self.reporter.removed(chunk_id, "hot")
            await asyncio.sleep(0.002)


@dataclass
class Watch:
    """Looks everything up, again and again, and notes what it was told."""

    indexes: list[LookupIndex]
    instances: list[Instance]
    chunk_ids: list[bytes]
    dead: str
    dead_since: float = float("inf")
    num_answers: int = 0
    longest_s: float = 0.0
    lag_s: float = 0.0
    unknown_at: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def work(self) -> None:
        by_name = {instance.name: instance for instance in self.instances}
        for index in itertools.cycle(self.indexes):
            asked_at = time.monotonic()
            try:
                found = await index.holders("t", self.chunk_ids)
            except UnavailableError:
                self.unknown_at.append(asked_at)
                found = []
            self.longest_s = max(self.longest_s, time.monotonic() - asked_at)
            self.num_answers += bool(found)
            for chunk_id, holders in zip(self.chunk_ids, found, strict=False):
                for holder in holders:
                    if holder.instance == self.dead and asked_at > self.dead_since + TTL_S:
                        self.wrong.append(
                            f"{holder.instance} is held to be alive"
                            f" {asked_at - self.dead_since:.1f} s after its end"
                        )
                    elif chunk_id not in by_name[holder.instance].ever_held:
                        self.wrong.append(f"{holder.instance} never held {chunk_id.hex()}")
            await asyncio.sleep(0.01)

    async def notice_lag(self) -> None:
        """How much too late this process wakes: what the machine takes from us is not Redis'
        fault.
        """
        while True:
            began_at = time.monotonic()
            await asyncio.sleep(0.01)
            self.lag_s = max(self.lag_s, time.monotonic() - began_at - 0.01)

    @property
    def unknown_s(self) -> float:
        """From the first to the last time that nothing was known."""
        return self.unknown_at[-1] - self.unknown_at[0] if self.unknown_at else 0.0


@asynccontextmanager
async def doing(*works: Callable[[], Any]) -> AsyncIterator[None]:
    """Something else, meanwhile; what it raises is raised."""
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise result


@asynccontextmanager
async def reporting(instance: Instance) -> AsyncIterator[None]:
    await instance.reporter.open()
    try:
        yield
    finally:
        await instance.reporter.close()


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def at_the_latest(timeout_s: float, condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def is_true_of(
    indexes: list[LookupIndex], instances: list[Instance], chunk_ids: list[bytes]
) -> bool:
    """Whether all say who holds what, no more and no less."""
    truth = [
        {instance.name for instance in instances if chunk_id in instance.held}
        for chunk_id in chunk_ids
    ]
    try:
        said = [await index.holders("t", chunk_ids) for index in indexes]
    except UnavailableError:
        return False
    return all(
        [{holder.instance for holder in holders} - {"mortal"} for holders in found] == truth
        for found in said
    )


@contextmanager
def behind_sentinels() -> Iterator[tuple[str, RedisServer]]:
    with watched_redis(down_after_ms=500) as watched:
        yield watched.url, watched.master


@contextmanager
def in_a_cluster(key: str) -> Iterator[tuple[str, RedisServer]]:
    with running_cluster(node_timeout_ms=1000) as cluster:
        yield cluster.url, cluster.servers[cluster.place_of(key)]


def keep_from_replicas(master: RedisServer) -> None:
    """Let it acknowledge what nobody else will ever know."""
    with master.client() as client:
        client.execute_command("ACL SETUSER", "default", "-psync", "-sync")
        assert client.execute_command("CLIENT KILL", "TYPE", "replica") >= 1


def key_beside_no_lease() -> str:
    """A bucket on another master than the leases."""
    with_leases = slot_third(LEASES_KEY)
    return next(
        key
        for key in (bucket_key("t", bucket) for bucket in range(64))
        if slot_third(key) != with_leases
    )


def slot_third(key: str) -> int:
    return slot_of(key) * NUM_MASTERS // NUM_SLOTS


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        *(("sentinel", "SIGKILL"), ("cluster, leases", "SIGKILL"), ("cluster, chunks", "SIGKILL")),
        *(("sentinel", "SIGSTOP"), ("cluster, leases", "SIGSTOP")),
    ],
)
async def test_a_master_fails_under_load(kind: str, end: str) -> None:
    """One that only stood still comes back with what it knew, when others have gone on."""
    chance = random.Random(SEED)
    chunk_ids = [chance.randbytes(16) for _ in range(NUM_CHUNKS)]
    servers = {
        "sentinel": behind_sentinels,
        "cluster, leases": lambda: in_a_cluster(LEASES_KEY),
        "cluster, chunks": lambda: in_a_cluster(key_beside_no_lease()),
    }[kind]
    with servers() as (url, master):
        indexes: list[LookupIndex] = [RedisIndex(RedisAccess.parse(url), OPTIONS) for _ in range(2)]
        instances = [
            Instance(ThroughIndex(indexes), f"i-{place}", chunk_ids, random.Random(SEED + place))
            for place in range(NUM_INSTANCES)
        ]
        mortal = Instance(
            cut := ThroughIndex(indexes), "mortal", chunk_ids, random.Random(SEED - 1)
        )
        watch = Watch(indexes, [*instances, mortal], chunk_ids, mortal.name)
        async with AsyncExitStack() as stack:
            for index in indexes:
                stack.push_async_callback(index.close)
            for instance in watch.instances:
                await stack.enter_async_context(reporting(instance))
            await until(lambda: all(instance.reporter.synced for instance in watch.instances), 20)
            async with doing(watch.work, watch.notice_lag):
                async with doing(*(instance.work for instance in instances)):
                    await asyncio.sleep(LOAD_S)
                    keep_from_replicas(master)
                    await asyncio.sleep(LOST_S)
                    # As by SIGKILL: its lease is left to run out.
                    cut.is_cut, watch.dead_since = True, time.monotonic()
                    num_resyncs = [instance.reporter.stats["num_resyncs"] for instance in instances]
                    (master.kill if end == "SIGKILL" else master.pause)()
                    await until(lambda: bool(watch.unknown_at), 5)
                    num_before = watch.num_answers
                    await until(lambda: watch.num_answers > num_before + 50, MOST_UNKNOWN_S + 5)
                await at_the_latest(HEALING_S, lambda: is_true_of(indexes, instances, chunk_ids))
                await asyncio.sleep(max(0.0, watch.dead_since + TTL_S + LOAD_S - time.monotonic()))
                if end == "SIGSTOP":
                    master.resume()
                    await asyncio.sleep(LOAD_S)
                    await at_the_latest(
                        HEALING_S, lambda: is_true_of(indexes, instances, chunk_ids)
                    )
                assert all(
                    instance.reporter.stats["num_resyncs"] > num
                    for instance, num in zip(instances, num_resyncs, strict=True)
                )
        assert not watch.wrong
        assert watch.unknown_s < MOST_UNKNOWN_S
        assert watch.longest_s < READ_TIMEOUT_S + 0.4 + 4 * watch.lag_s
