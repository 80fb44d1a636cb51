"""The index in Redis, shared by any number of stateless replicas. While Redis is unavailable, a
breaker answers.

A lookup is one round trip: the version of the lease table, and the values of the chunks. The table
itself is read again only if its version has changed or a lease in it may have expired.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from lmcache_core.keys import CHUNK_ID_BYTES
from lmcache_core.lookup import Holder
from lmcache_core.lookup.messages import EventsAck, InstanceEntry, StatsAnswer
from lmcache_core.security import SHARED_OWNER
from lmcache_servicekit.redis_client import (
    Argument,
    RedisAccess,
    RedisCommand,
    call,
)
from lmcache_servicekit.redis_cluster import RedisClusterClient, create_redis_client
from typing_extensions import override

from lmcache_lookup.index import redis_scripts as scripts
from lmcache_lookup.index.base import (
    MAX_STORED_HOLDERS_PER_CHUNK,
    EventBatch,
    LeaseClaim,
    LookupIndex,
    check_places,
)
from lmcache_lookup.index.breaker import IndexBreaker
from lmcache_lookup.index.packing import (
    LEASES_KEY,
    MARKS_KEY,
    NODES_KEY,
    NUM_BUCKETS,
    NUMBERS_KEY,
    TENANTS_KEY,
    VERSION_KEY,
    LiveTable,
    bucket_key,
    bucket_of,
    lease_field,
    split_by_bucket,
    unpack_holders,
)
from lmcache_lookup.index.redis_sweeper import BucketSweeper
from lmcache_lookup.index.redis_writer import (
    ClusterWriter,
    ServerWriter,
    WriteBounds,
    incarnation_text,
)

T = TypeVar("T")
P = ParamSpec("P")

MAX_TENANTS_KEPT: Final = 256

_BEFORE_ID: Final = b"\r\n$%d\r\n" % CHUNK_ID_BYTES
_NO_TABLE: Final = LiveTable(b"", stale_at=float("-inf"))


@dataclass(frozen=True, slots=True)
class RedisIndexOptions:
    """Bounds of a Redis index.

    Attributes:
        read_timeout_s: Limit on lookups, from waiting for a connection to the last byte.
        write_timeout_s: Limit on everything else.
        max_instances: Bound on leases of tenants, and on shared ones.
        max_instances_per_tenant: Bound on leases of one owner.
        max_chunks_per_tenant: Bound on entries of one tenant, enforced in each bucket.
    """

    read_timeout_s: float = 0.1
    write_timeout_s: float = 0.8
    max_instances: int = 4096
    max_instances_per_tenant: int = 1024
    max_chunks_per_tenant: int = 1_000_000


class RedisIndex(LookupIndex):
    """An index in Redis; see `packing` for its layout, and `redis_scripts` for its atomic
    operations.

    Raises:
        ConfigError: The URL or a file for TLS cannot be read.
    """

    name = "redis"

    def __init__(
        self,
        access: RedisAccess,
        options: RedisIndexOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._clock = clock
        self._table = _NO_TABLE
        self._breaker = IndexBreaker(self.name)
        self._client = create_redis_client(access, options.write_timeout_s)
        self.where = self._client.where
        self._max_bucket_chunks = -(-options.max_chunks_per_tenant // NUM_BUCKETS)
        bounds = WriteBounds(MAX_STORED_HOLDERS_PER_CHUNK, self._max_bucket_chunks)
        self._writer = (
            ClusterWriter(self._client, bounds, options.write_timeout_s)
            if isinstance(self._client, RedisClusterClient)
            else ServerWriter(self._client, bounds)
        )
        self._reads: dict[str, list[tuple[str, bytes]]] = {}
        self._sweeper = BucketSweeper(self._client, self._current_table)

    @override
    async def open(self) -> None:
        """Do nothing: connections are opened on demand."""

    @override
    async def close(self) -> None:
        await self._client.close()

    @override
    async def ping(self) -> None:
        timeout_s = self._options.read_timeout_s
        await self._breaker.ping(
            lambda: self._client.within(timeout_s, self._client.ping(VERSION_KEY))
        )

    @override
    async def renew(self, owner: str, claim: LeaseClaim) -> EventsAck:
        return await self._breaker.call(
            lambda: self._client.within(self._options.write_timeout_s, self._renew(owner, claim)),
            write="renew",
        )

    @override
    async def end(self, owner: str, instance: str, incarnation: int | None = None) -> bool:
        argv = [
            lease_field(owner, instance),
            "" if incarnation is None else incarnation_text(incarnation),
        ]
        keys = [LEASES_KEY, VERSION_KEY]
        return bool(await self._write(self._client.run, scripts.END, keys, argv))

    @override
    async def apply(self, owner: str, batch: EventBatch) -> EventsAck:
        field = lease_field(owner, batch.instance)
        return await self._breaker.call(
            lambda: self._client.within(self._options.write_timeout_s, self._apply(field, batch)),
            write="apply",
        )

    @override
    async def holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        return await self._breaker.call(
            lambda: self._client.within(
                self._options.read_timeout_s, self._holders(tenant, chunk_ids)
            )
        )

    @override
    async def instances(self, owner: str) -> list[InstanceEntry]:
        asked_at = self._clock()
        table = await self._write(self._load_table)
        return sorted(
            (
                InstanceEntry(
                    live.instance,
                    live.lease.kind,
                    incarnation,
                    live.lease.next_sequence,
                    max(0, int((live.expires_at - asked_at) * 1000)),
                )
                for (_, incarnation), live in table.by_identity.items()
                if live.owner == owner
            ),
            key=lambda status: status.instance,
        )

    @override
    async def evict(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        asked = [
            (bucket_key(tenant, bucket), inside)
            for bucket, inside in enumerate(split_by_bucket(chunk_ids))
            if inside
        ]
        commands = [call(scripts.EVICT, [key], inside) for key, inside in asked]
        return sum(count or 0 for count in await self._write(self._client.many, commands))

    @override
    async def clear(self, tenant: str) -> None:
        # An instance may announce as soon as it is asked: what it announces must not be deleted. If
        # only a part could be deleted, it is announced again all the same.
        try:
            await self._write(
                self._client.many,
                [RedisCommand(key, ("UNLINK", key)) for key in _buckets_of(tenant)],
            )
        finally:
            await self._write(self._client.run, scripts.RESYNC, [LEASES_KEY], [tenant])

    @override
    async def sweep(self) -> int:
        return 0 if self._breaker.is_open else await self._write(self._sweeper.step)

    @override
    async def stats(self, tenant: str) -> StatsAnswer:
        keys = _buckets_of(tenant)
        sizes = [RedisCommand(key, ("HLEN", key)) for key in keys]
        others = [RedisCommand(key, ("HMGET", key, "#n", "#at")) for key in keys]
        answers = await self._write(self._client.many, sizes + others)
        num_chunks = sum(count or 0 for count in answers[:NUM_BUCKETS])
        for fields in answers[NUM_BUCKETS:]:
            num_chunks -= sum(value is not None for value in fields or ())
        num_instances = len(await self.instances(tenant) + await self.instances(SHARED_OWNER))
        return StatsAnswer(self.name, False, num_chunks, num_instances)

    @override
    async def tenants(self) -> list[str]:
        asking = RedisCommand(TENANTS_KEY, ("SMEMBERS", TENANTS_KEY))
        found = (await self._write(self._client.many, [asking]))[0]
        return sorted(tenant.decode() for tenant in found or ())

    async def _renew(self, owner: str, claim: LeaseClaim) -> EventsAck:
        seen = await self._writer.masters_seen()
        lease: list[Argument] = [
            lease_field(owner, claim.instance),
            incarnation_text(claim.incarnation),
            claim.kind,
            claim.ttl_ms,
        ]
        bounds = self._options
        argv = [
            *lease,
            bounds.max_instances,
            seen.epoch,
            seen.run_ids,
            seen.marks,
            bounds.max_instances_per_tenant,
        ]
        keys = [LEASES_KEY, VERSION_KEY, NUMBERS_KEY, NODES_KEY, MARKS_KEY]
        next_sequence, resync, taken = await self._client.run(scripts.RENEW, keys, argv)
        check_places(taken != 0, taken >= 0, bounds.max_instances, bounds.max_instances_per_tenant)
        return EventsAck(next_sequence, bool(resync))

    async def _apply(self, field: str, batch: EventBatch) -> EventsAck:
        answer = await self._writer.take(field, batch)
        while self._writer.full:
            bucket = self._writer.full.pop()
            newest = [
                event.chunk_id
                for event in batch.events
                if bucket_key(event.tenant, bucket_of(event.chunk_id)) == bucket
            ]
            self.num_dropped += await self._sweeper.trim(bucket, self._max_bucket_chunks, newest)
        return answer

    async def _holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        # The version is requested together with the values, and before them on its server: an
        # instance that is live in this version was alive after the call began.
        buckets = split_by_bucket(chunk_ids)
        commands = [
            RedisCommand(VERSION_KEY, ("GET", VERSION_KEY)),
            *self._reads_of(tenant, buckets),
        ]
        version, *values_of_buckets = await self._client.many(commands)
        await self._refresh_table(version or b"")
        # The chunks of one prompt mostly have the same holders, tiers and sizes: equal bytes are
        # parsed once.
        asked_buckets = [inside for inside in buckets if inside]
        values: list[bytes | None] = list(
            itertools.chain.from_iterable(
                # A foreign value under a bucket's key holds nothing.
                [None] * len(inside) if answer is None else answer
                for inside, answer in zip(asked_buckets, values_of_buckets, strict=True)
            )
        )
        read = {value: self._live_holders(value or b"") for value in set(values)}
        if len(read) == 1:
            return list(read.values()) * len(chunk_ids)
        asked = itertools.chain.from_iterable(buckets)
        value_of = dict(zip(asked, values, strict=True))
        return [read[value_of[chunk_id]] for chunk_id in chunk_ids]

    def _reads_of(self, tenant: str, buckets: Sequence[Sequence[bytes]]) -> list[RedisCommand]:
        """Return one `HMGET` for each bucket in the request.

        Its hundreds of chunk ids are joined without looking at each. The parts common to all
        commands of a tenant are cached: the keys, and the bytes between the number of words and the
        first id.
        """
        kept = self._reads.get(tenant)
        if kept is None:
            if len(self._reads) >= MAX_TENANTS_KEPT:
                self._reads.clear()
            keys = _buckets_of(tenant)
            kept = self._reads[tenant] = [
                (
                    key,
                    b"\r\n$5\r\nHMGET\r\n$%d\r\n%b%b" % (len(key), key.encode("ascii"), _BEFORE_ID),
                )
                for key in keys
            ]
        return [
            RedisCommand(
                key, (), packed=b"*%d%b%b\r\n" % (len(inside) + 2, head, _BEFORE_ID.join(inside))
            )
            for (key, head), inside in zip(kept, buckets, strict=True)
            if inside
        ]

    def _live_holders(self, value: bytes) -> list[Holder]:
        known = self._table.by_identity
        return [
            Holder(live.instance, live.lease.kind, packed.tier, packed.size_bytes)
            for packed in unpack_holders(value)
            if (live := known.get((packed.number, packed.incarnation))) is not None
        ]

    async def _current_table(self) -> LiveTable:
        version = (await self._client.many([RedisCommand(VERSION_KEY, ("GET", VERSION_KEY))]))[0]
        await self._refresh_table(version or b"")
        return self._table

    async def _refresh_table(self, version: bytes) -> None:
        if version != self._table.version or self._clock() >= self._table.stale_at:
            await self._load_table()

    async def _load_table(self) -> LiveTable:
        asked_at = self._clock()
        reply: Any = await self._client.run(scripts.TABLE, [LEASES_KEY, VERSION_KEY], [])
        self._table = LiveTable.from_reply(reply, asked_at)
        return self._table

    async def _write(
        self, call: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs
    ) -> T:
        timeout_s = self._options.write_timeout_s
        return await self._breaker.call(
            lambda: self._client.within(timeout_s, call(*args, **options))
        )


def _buckets_of(tenant: str) -> list[str]:
    return [bucket_key(tenant, bucket) for bucket in range(NUM_BUCKETS)]
