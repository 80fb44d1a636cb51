"""The index in Redis: any number of stateless replicas share it.

A lookup is one round trip: the version of the lease table, and the values of the chunks. The table
itself is read again only when its version changed or a lease in it may have run out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from lmcache_core.lookup import Holder
from lmcache_core.security.tls import TlsFiles
from lmcache_servicekit.sentinel_login import SentinelLogin

from lmcache_lookup.index import redis_scripts as scripts
from lmcache_lookup.index.base import (
    MAX_STORED_HOLDERS_PER_CHUNK,
    EventBatch,
    IndexStats,
    InstanceStatus,
    LeaseClaim,
    LeaseState,
    LookupIndex,
    check_places,
)
from lmcache_lookup.index.bucket_reads import BucketReads
from lmcache_lookup.index.cluster_map import ClusterMap
from lmcache_lookup.index.cluster_shards import ClusterShards
from lmcache_lookup.index.live_table import LiveTable
from lmcache_lookup.index.one_server import OneServer
from lmcache_lookup.index.packing import (
    LEASES_KEY,
    MARKS_KEY,
    NODES_KEY,
    NUM_BUCKETS,
    NUMBERS_KEY,
    TENANTS_KEY,
    VERSION_KEY,
    bucket_key,
    lease_field,
    split_by_bucket,
    unpack_holders,
)
from lmcache_lookup.index.redis_node import Argument, Command, within
from lmcache_lookup.index.redis_shards import RedisShards, Taking, incarnation_text
from lmcache_lookup.index.redis_sweeper import BucketSweeper
from lmcache_lookup.index.redis_urls import RedisTarget, read_redis_url

T = TypeVar("T")

_NO_TABLE: Final = LiveTable(b"", stale_at=float("-inf"))


@dataclass(frozen=True, slots=True)
class RedisIndexOptions:
    """Bounds of a Redis index.

    Attributes:
        read_timeout_s: Limit on lookups, from waiting for a connection to the last byte.
        write_timeout_s: Limit on everything else.
        max_instances: Bound on leases.
        max_instances_per_tenant: Bound on leases of one owner.
        max_chunks_per_tenant: Bound on chunks of one tenant, enforced in each bucket.
        tls: Whom to trust and what to show, where the URL is one with TLS.
        sentinel_login: What sentinels are told; None: nothing.
    """

    read_timeout_s: float = 0.1
    write_timeout_s: float = 0.8
    max_instances: int = 4096
    max_instances_per_tenant: int = 1024
    max_chunks_per_tenant: int = 1_000_000
    tls: TlsFiles | None = None
    sentinel_login: SentinelLogin | None = None


class RedisIndex(LookupIndex):
    """See `packing` for the layout, `redis_scripts` for what is atomic, and `redis_urls` for URLs.

    Args:
        url: Where, password included.
        options: Bounds.
        clock: Seconds, monotonic.

    Raises:
        ConfigError: The URL or a file for TLS cannot be read.
    """

    name = "redis"

    def __init__(
        self, url: str, options: RedisIndexOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._table = _NO_TABLE
        target = read_redis_url(url, options.tls, options.sentinel_login)
        self._shards = _shards_of(target, options.write_timeout_s)
        self.where = target.where
        self._reads = BucketReads()
        self._sweeper = BucketSweeper(self._shards, self._current_table)

    async def open(self) -> None:
        """Connections are made when they are needed."""

    async def close(self) -> None:
        """Close the connections."""
        await self._shards.close()

    async def ping(self) -> None:
        """See `LookupIndex.ping`."""
        await within(self.where, self._options.read_timeout_s, self._shards.ping())

    async def renew(self, owner: str, claim: LeaseClaim) -> LeaseState:
        """See `LookupIndex.renew`."""
        return await self._write(self._renew(owner, claim))

    async def end(self, owner: str, instance: str, incarnation: int | None = None) -> bool:
        """See `LookupIndex.end`."""
        argv = [
            lease_field(owner, instance),
            "" if incarnation is None else incarnation_text(incarnation),
        ]
        return bool(
            await self._write(self._shards.run(scripts.END, [LEASES_KEY, VERSION_KEY], argv))
        )

    async def apply(self, owner: str, batch: EventBatch) -> LeaseState:
        """See `LookupIndex.apply`."""
        field = lease_field(owner, batch.instance)
        max_bucket_chunks = -(-self._options.max_chunks_per_tenant // NUM_BUCKETS)
        return await self._write(
            self._shards.take(Taking(field, batch, MAX_STORED_HOLDERS_PER_CHUNK, max_bucket_chunks))
        )

    async def holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        """See `LookupIndex.holders`."""
        return await within(
            self.where, self._options.read_timeout_s, self._holders(tenant, chunk_ids)
        )

    async def instances(self, owner: str) -> list[InstanceStatus]:
        """See `LookupIndex.instances`."""
        asked_at = self._clock()
        table = await self._write(self._load_table())
        return sorted(
            (
                InstanceStatus(
                    live.instance,
                    live.lease.kind,
                    incarnation,
                    live.lease.next_sequence,
                    int((live.expires_at - asked_at) * 1000),
                )
                for (_, incarnation), live in table.by_identity.items()
                if live.owner == owner
            ),
            key=lambda status: status.instance,
        )

    async def evict(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        """See `LookupIndex.evict`."""
        asked = [
            (bucket_key(tenant, bucket), inside)
            for bucket, inside in enumerate(split_by_bucket(chunk_ids))
            if inside
        ]
        commands = [Command(key, ("HDEL", key, *inside)) for key, inside in asked]
        return sum(count or 0 for count in await self._write(self._shards.many(commands)))

    async def clear(self, tenant: str) -> None:
        """See `LookupIndex.clear`: the instances are asked to begin anew first, so that nothing
        counts which is taken meanwhile.
        """
        await self._write(self._shards.run(scripts.RESYNC, [LEASES_KEY], [tenant]))
        await self._write(self._shards.many(_to_every_bucket("UNLINK", tenant)))

    async def sweep(self) -> int:
        """See `LookupIndex.sweep`."""
        return await self._write(self._sweeper.step())

    async def stats(self, tenant: str) -> IndexStats:
        """See `LookupIndex.stats`."""
        num_chunks = sum(
            count or 0
            for count in await self._write(self._shards.many(_to_every_bucket("HLEN", tenant)))
        )
        return IndexStats(num_chunks, len(await self.instances(tenant)))

    async def tenants(self) -> list[str]:
        """See `LookupIndex.tenants`."""
        found = (
            await self._write(self._shards.many([Command(TENANTS_KEY, ("SMEMBERS", TENANTS_KEY))]))
        )[0]
        return sorted(tenant.decode() for tenant in found or ())

    async def _renew(self, owner: str, claim: LeaseClaim) -> LeaseState:
        seen = await self._shards.masters_seen()
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
        next_sequence, resync, taken = await self._shards.run(scripts.RENEW, keys, argv)
        check_places(taken != 0, taken >= 0, bounds.max_instances, bounds.max_instances_per_tenant)
        return LeaseState(next_sequence, bool(resync))

    async def _holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        """The version is asked for with the values, and on its server before them: who is alive
        by it was so after the call began.
        """
        buckets = split_by_bucket(chunk_ids)
        commands = [Command(VERSION_KEY, ("GET", VERSION_KEY)), *self._reads.of(tenant, buckets)]
        version, *values_of_buckets = await self._shards.many(commands)
        await self._refresh_table(version or b"")
        # The chunks of one prompt mostly have the same holders, tiers and sizes: the same bytes are
        # read once.
        asked_buckets = [inside for inside in buckets if inside]
        values: list[bytes | None] = list(
            itertools.chain.from_iterable(
                # A foreign value in the place of a bucket holds nothing.
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

    def _live_holders(self, value: bytes) -> list[Holder]:
        known = self._table.by_identity
        return [
            Holder(live.instance, live.lease.kind, packed.tier, packed.size_bytes)
            for packed in unpack_holders(value)
            if (live := known.get((packed.number, packed.incarnation))) is not None
        ]

    async def _current_table(self) -> LiveTable:
        version = (await self._shards.many([Command(VERSION_KEY, ("GET", VERSION_KEY))]))[0]
        await self._refresh_table(version or b"")
        return self._table

    async def _refresh_table(self, version: bytes) -> None:
        if version != self._table.version or self._clock() >= self._table.stale_at:
            await self._load_table()

    async def _load_table(self) -> LiveTable:
        asked_at = self._clock()
        reply: Any = await self._shards.run(scripts.TABLE, [LEASES_KEY, VERSION_KEY], [])
        self._table = LiveTable.from_reply(reply, asked_at)
        return self._table

    async def _write(self, call: Awaitable[T]) -> T:
        return await within(self.where, self._options.write_timeout_s, call)


def _shards_of(target: RedisTarget, timeout_s: float) -> RedisShards:
    if not target.is_cluster:
        return OneServer(target.node(timeout_s))
    return ClusterShards(ClusterMap(target.addresses, target.members(timeout_s)), timeout_s)


def _to_every_bucket(name: str, tenant: str) -> list[Command]:
    keys = [bucket_key(tenant, bucket) for bucket in range(NUM_BUCKETS)]
    return [Command(key, (name, key)) for key in keys]
