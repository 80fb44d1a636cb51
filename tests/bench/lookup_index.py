"""The lookup index in Redis: how long it takes to read 400 chunks and to take events, and what
Redis needs to keep them.

One real server, and a cluster of three masters with a replica each, on loopback. Reading is held
against a plain redis-py client that gets as many values of as many bytes by one `MGET`, in turn
with it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import redis
from lmcache_lookup.index import EventBatch, IndexEvent, LeaseClaim, LookupIndex
from lmcache_lookup.index.packing import NUM_BUCKETS, bucket_key, bucket_of
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_servicekit.redis_client import RedisAccess

from tests.bench.report import Section
from tests.fixtures.redis_cluster import NUM_MASTERS, running_cluster
from tests.fixtures.redis_server import RedisServer, running_redis

TENANT = "acme"
INSTANCES = ("sidecar-0", "sidecar-1")
NUM_CHUNKS = 1_000_000
NUM_CHUNKS_IN_CLUSTER = 200_000
NUM_ASKED = 400
NUM_ROUNDS = 201
BATCH_EVENTS = 2048
VALUE_BYTES = 49
"""Two holders, in the tiers `hot` and `disk`."""
GOAL_BYTES = 250
OPTIONS = RedisIndexOptions(read_timeout_s=10, write_timeout_s=30)


@dataclass(frozen=True)
class Loaded:
    """What was measured while chunks were stored.

    Attributes:
        chunk_ids: Those that two instances hold now.
        events_per_s: Stores that were acknowledged, from one caller that waits for each batch.
    """

    chunk_ids: Sequence[bytes]
    events_per_s: float


def measure() -> list[Section]:
    """The tables; takes about half a minute."""
    speed: list[Sequence[str]] = []
    with running_redis() as server, server.client() as plain:
        empty = _used_bytes([server])
        index = RedisIndex(RedisAccess.parse(server.url), OPTIONS)
        with asyncio.Runner() as runner:
            loaded = runner.run(_load(index, NUM_CHUNKS))
            used = _used_bytes([server]) - empty
            memory = [
                _memory_row("one server", NUM_CHUNKS, used),
                *_bucket_rows(plain, loaded.chunk_ids),
            ]
            speed += [
                _read_row(runner, "one server", index, loaded, plain),
                _event_row("one server", loaded),
            ]
            runner.run(index.close())
    with running_cluster() as cluster, cluster.servers[0].client() as plain:
        masters = cluster.servers[:NUM_MASTERS]
        empty = _used_bytes(masters)
        index = RedisIndex(RedisAccess.parse(cluster.url), OPTIONS)
        with asyncio.Runner() as runner:
            loaded = runner.run(_load(index, NUM_CHUNKS_IN_CLUSTER))
            memory.append(
                _memory_row(
                    "cluster, its masters", NUM_CHUNKS_IN_CLUSTER, _used_bytes(masters) - empty
                )
            )
            memory.append(_balance_row(masters))
            speed += [
                _read_row(runner, "cluster", index, loaded, None),
                _event_row("cluster", loaded),
            ]
            runner.run(index.close())
    return [
        Section(
            "Lookup index in Redis: time",
            ("what", "figure", "fastest … nine in ten", "goal", "note"),
            speed,
        ),
        Section(
            "Lookup index in Redis: memory, both holders of each chunk included",
            ("what", "bytes a chunk", "goal", "note"),
            memory,
        ),
    ]


async def _load(index: LookupIndex, num_chunks: int) -> Loaded:
    chance = random.Random(1)
    chunk_ids = [chance.randbytes(16) for _ in range(num_chunks)]
    began_at = time.perf_counter()
    for number, (instance, tier) in enumerate(zip(INSTANCES, ("hot", "disk"), strict=True)):
        incarnation = 1_800_000_000_000_000_000 + number
        await index.renew(TENANT, LeaseClaim(instance, incarnation, "sidecar", 3_600_000))
        for first in range(0, num_chunks, BATCH_EVENTS):
            events = [
                IndexEvent("store", TENANT, chunk_id, tier, 32 << 20)
                for chunk_id in chunk_ids[first : first + BATCH_EVENTS]
            ]
            state = await index.apply(TENANT, EventBatch(instance, incarnation, first, events))
            assert state.next_sequence == first + len(events), "the index has taken the batch"
    return Loaded(chunk_ids, len(INSTANCES) * num_chunks / (time.perf_counter() - began_at))


def _read_row(
    runner: asyncio.Runner,
    where: str,
    index: LookupIndex,
    loaded: Loaded,
    plain: redis.Redis | None,
) -> Sequence[str]:
    chance = random.Random(2)
    questions = [chance.sample(loaded.chunk_ids, NUM_ASKED) for _ in range(NUM_ROUNDS)]
    keys = [f"plain:{number}" for number in range(NUM_ASKED)]
    if plain is not None:
        plain.mset(dict.fromkeys(keys, b"v" * VALUE_BYTES))

    async def read() -> tuple[list[float], list[float]]:
        mine, beside = [], []
        for question in questions:
            mine.append(
                await _elapsed_ms(lambda question=question: index.holders(TENANT, question))
            )
            if plain is not None:
                began_at = time.perf_counter()
                plain.mget(keys)
                beside.append((time.perf_counter() - began_at) * 1000)
        return mine, beside

    found = runner.run(index.holders(TENANT, questions[0]))
    assert all(len(holders) == len(INSTANCES) for holders in found), "every chunk has both holders"
    mine, beside = runner.run(read())
    note = (
        f"{statistics.median(beside):.2f} ms: redis-py, one MGET, no holders"
        if beside
        else "three servers asked at once"
    )
    goal = "about 1 ms" if plain is not None else ""
    low, high = min(mine), statistics.quantiles(mine, n=10)[-1]
    what = f"{where}: holders of {NUM_ASKED} of {len(loaded.chunk_ids):,} chunks"
    return (what, f"{statistics.median(mine):.2f} ms", f"{low:.2f} … {high:.2f} ms", goal, note)


async def _elapsed_ms(call: Callable[[], Awaitable[object]]) -> float:
    began_at = time.perf_counter()
    await call()
    return (time.perf_counter() - began_at) * 1000


def _event_row(where: str, loaded: Loaded) -> Sequence[str]:
    note = f"batches of {BATCH_EVENTS}"
    return (f"{where}: events", f"{loaded.events_per_s:,.0f} a second", "", "", note)


def _memory_row(where: str, num_chunks: int, used_bytes: int) -> Sequence[str]:
    return (
        f"{where}: {num_chunks:,} chunks",
        f"{used_bytes / num_chunks:.0f}",
        str(GOAL_BYTES),
        "used_memory of INFO, net",
    )


def _bucket_rows(plain: redis.Redis, chunk_ids: Sequence[bytes]) -> Iterator[Sequence[str]]:
    keys = [bucket_key(TENANT, bucket) for bucket in range(NUM_BUCKETS)]
    used = sum(plain.memory_usage(key, samples=0) for key in keys)
    yield (
        "one server: the buckets alone",
        f"{used / len(chunk_ids):.0f}",
        "",
        "MEMORY USAGE of each, every field counted",
    )
    with _small_buckets(plain, chunk_ids[: 256 * NUM_BUCKETS]) as num_chunks:
        used = sum(plain.memory_usage(f"small:{key}", samples=0) for key in keys)
        yield (
            f"one server: {num_chunks:,} chunks",
            f"{used / num_chunks:.0f}",
            "",
            "MEMORY USAGE; buckets of up to 512 chunks are packed more tightly",
        )


@contextmanager
def _small_buckets(plain: redis.Redis, chunk_ids: Sequence[bytes]) -> Iterator[int]:
    pipeline = plain.pipeline(transaction=False)
    for chunk_id in chunk_ids:
        pipeline.hset(
            f"small:{bucket_key(TENANT, bucket_of(chunk_id))}", chunk_id, b"v" * VALUE_BYTES
        )
    pipeline.execute()
    yield len(chunk_ids)


def _balance_row(masters: Sequence[RedisServer]) -> Sequence[str]:
    counts = []
    for server in masters:
        with server.client() as client:
            counts.append(sum(1 for _ in client.scan_iter(match="lmc2:{b:*")))
    return (
        "cluster: buckets of its masters",
        " / ".join(str(count) for count in counts),
        "",
        "by hash tags that divide the slots evenly",
    )


def _used_bytes(servers: Sequence[RedisServer]) -> int:
    used = 0
    for server in servers:
        with server.client() as client:
            used += int(client.info("memory")["used_memory"])
    return used
