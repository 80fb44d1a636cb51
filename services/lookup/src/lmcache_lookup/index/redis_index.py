"""The index in Redis: any number of stateless replicas share it.

A lookup is one call: the version of the lease table, and the values of the chunks. The table itself is read again only when its version
changed or a lease in it may have run out.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from lmcache_core.errors import CapacityError
from lmcache_core.lookup import Holder

from lmcache_lookup.index import redis_scripts as scripts
from lmcache_lookup.index.base import (
    MAX_STORED_HOLDERS_PER_CHUNK,
    EventBatch,
    IndexStats,
    InstanceStatus,
    LeaseClaim,
    LeaseState,
    LookupIndex,
)
from lmcache_lookup.index.live_table import LiveTable
from lmcache_lookup.index.packing import (
    LEASES_KEY,
    NUM_BUCKETS,
    NUMBERS_KEY,
    TENANTS_KEY,
    VERSION_KEY,
    bucket_key,
    bucket_of,
    lease_field,
    pack_identity,
    pack_life,
    unpack_holders,
)
from lmcache_lookup.index.redis_connection import Argument, RedisConnection

T = TypeVar("T")

SWEEP_PAGE_CHUNKS: Final = 1024

_NO_TABLE: Final = LiveTable(b"", stale_at=float("-inf"))


@dataclass(frozen=True, slots=True)
class RedisIndexOptions:
    """Bounds of a Redis index.

    Attributes:
        read_timeout_s: Limit on lookups, from waiting for a connection to the last byte.
        write_timeout_s: Limit on everything else.
        entry_ttl_s: A bucket that nobody writes to leaves Redis after this long.
        max_instances: Bound on leases.
    """

    read_timeout_s: float = 0.1
    write_timeout_s: float = 0.8
    entry_ttl_s: int = 86_400
    max_instances: int = 4096


class RedisIndex(LookupIndex):
    """See `packing` for the layout and `redis_scripts` for what is atomic.

    Args:
        url: `redis://`, `rediss://` or `unix://`, password included.
        options: Bounds.
        clock: Seconds, monotonic.

    Raises:
        ConfigError: The URL cannot be read.
    """

    name = "redis"

    def __init__(self, url: str, options: RedisIndexOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._table = _NO_TABLE
        self._sweep_positions = itertools.cycle(range(NUM_BUCKETS))
        self._connection = RedisConnection(url, options.write_timeout_s)
        self._redis = self._connection.client

    async def open(self) -> None:
        """Connections are made when they are needed."""

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def ping(self) -> None:
        """See `LookupIndex.ping`."""
        await self._connection.within(self._options.read_timeout_s, _reply(self._redis.ping()))

    async def renew(self, owner: str, claim: LeaseClaim) -> LeaseState:
        """See `LookupIndex.renew`."""
        field = lease_field(owner, claim.instance)
        argv: list[Argument] = [field, _text(claim.incarnation), claim.kind, claim.ttl_ms, self._options.max_instances]
        next_sequence, resync, taken = await self._write(self._connection.run(scripts.RENEW, [LEASES_KEY, VERSION_KEY, NUMBERS_KEY], argv))
        if not taken:
            raise CapacityError(f"{self._options.max_instances} instances hold leases already; raise max_instances")
        return LeaseState(next_sequence, bool(resync))

    async def end(self, owner: str, instance: str, incarnation: int | None = None) -> bool:
        """See `LookupIndex.end`."""
        argv = [lease_field(owner, instance), "" if incarnation is None else _text(incarnation)]
        return bool(await self._write(self._connection.run(scripts.END, [LEASES_KEY, VERSION_KEY], argv)))

    async def apply(self, owner: str, batch: EventBatch) -> LeaseState:
        """See `LookupIndex.apply`: one script, so that number and entries change together or not at all."""
        keys = {LEASES_KEY: 1, TENANTS_KEY: 2}
        flat: list[Argument] = []
        for event in batch.events:
            place = keys.setdefault(bucket_key(event.tenant, bucket_of(event.chunk_id)), len(keys) + 1)
            flat += [place, event.chunk_id, pack_life(batch.incarnation, event.size_bytes, event.tier), int(event.op == "store")]
        tenants = sorted({event.tenant for event in batch.events})
        head: list[Argument] = [lease_field(owner, batch.instance), _text(batch.incarnation), batch.first_sequence]
        bounds: list[Argument] = [self._options.entry_ttl_s, MAX_STORED_HOLDERS_PER_CHUNK]
        argv = [*head, *bounds, len(tenants), *tenants, *flat]
        next_sequence, resync = await self._write(self._connection.run(scripts.APPLY, list(keys), argv))
        return LeaseState(next_sequence, bool(resync))

    async def holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        """See `LookupIndex.holders`."""
        return await self._connection.within(self._options.read_timeout_s, self._holders(tenant, chunk_ids))

    async def instances(self, owner: str) -> list[InstanceStatus]:
        """See `LookupIndex.instances`."""
        asked_at = self._clock()
        table = await self._write(self._load_table())
        return sorted(
            (
                InstanceStatus(
                    live.instance, live.lease.kind, incarnation, live.lease.next_sequence, int((live.expires_at - asked_at) * 1000)
                )
                for (_, incarnation), live in table.by_identity.items()
                if live.owner == owner
            ),
            key=lambda status: status.instance,
        )

    async def evict(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        """See `LookupIndex.evict`."""
        buckets = _by_bucket(chunk_ids)
        pipeline = self._redis.pipeline(transaction=False)
        for bucket, places in buckets.items():
            pipeline.hdel(bucket_key(tenant, bucket), *(chunk_ids[place] for place in places))
        return sum(await self._write(pipeline.execute())) if buckets else 0

    async def clear(self, tenant: str) -> None:
        """See `LookupIndex.clear`."""
        pipeline = self._redis.pipeline(transaction=False)
        for bucket in range(NUM_BUCKETS):
            pipeline.unlink(bucket_key(tenant, bucket))
        await self._write(pipeline.execute())
        await self._write(self._connection.run(scripts.RESYNC, [LEASES_KEY], [tenant]))

    async def sweep(self) -> int:
        """See `LookupIndex.sweep`: looks at one bucket of every tenant a call."""
        bucket = next(self._sweep_positions)
        tenants: Iterable[bytes] = await self._write(_reply(self._redis.smembers(TENANTS_KEY)))
        return sum([await self._sweep_bucket(bucket_key(tenant.decode(), bucket)) for tenant in tenants])

    async def stats(self, tenant: str) -> IndexStats:
        """See `LookupIndex.stats`."""
        pipeline = self._redis.pipeline(transaction=False)
        for bucket in range(NUM_BUCKETS):
            pipeline.hlen(bucket_key(tenant, bucket))
        return IndexStats(sum(await self._write(pipeline.execute())), len(await self.instances(tenant)))

    async def tenants(self) -> list[str]:
        """See `LookupIndex.tenants`."""
        found: Iterable[bytes] = await self._write(_reply(self._redis.smembers(TENANTS_KEY)))
        return sorted(tenant.decode() for tenant in found)

    async def _holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        keys, argv, places = [VERSION_KEY], list[Argument](), list[int]()
        for bucket, inside in _by_bucket(chunk_ids).items():
            keys.append(bucket_key(tenant, bucket))
            argv += [len(inside), *(chunk_ids[place] for place in inside)]
            places += inside
        version, *values = await self._connection.run(scripts.READ, keys, argv)
        await self._refresh_table(version)
        # The chunks of one prompt mostly have the same holders, tiers and sizes: the same bytes are read once.
        read: dict[bytes | None, list[Holder]] = {value: self._live_holders(value or b"") for value in set(values)}
        result: list[list[Holder]] = [[]] * len(chunk_ids)
        for place, value in zip(places, values, strict=True):
            result[place] = read[value]
        return result

    def _live_holders(self, value: bytes) -> list[Holder]:
        known = self._table.by_identity
        return [
            Holder(live.instance, live.lease.kind, packed.tier, packed.size_bytes)
            for packed in unpack_holders(value)
            if (live := known.get((packed.number, packed.incarnation))) is not None
        ]

    async def _refresh_table(self, version: bytes) -> None:
        if version != self._table.version or self._clock() >= self._table.stale_at:
            await self._load_table()

    async def _load_table(self) -> LiveTable:
        asked_at = self._clock()
        self._table = LiveTable.from_reply(await self._connection.run(scripts.TABLE, [LEASES_KEY, VERSION_KEY], []), asked_at)
        return self._table

    async def _sweep_bucket(self, key: str) -> int:
        """The table's version is asked for after the entries: whoever wrote them had its lease before."""
        num_swept = cursor = 0
        while True:
            cursor, page = await self._write(_reply(self._redis.hscan(key, cursor, count=SWEEP_PAGE_CHUNKS)))
            if page:
                await self._write(self._refresh_table((await self._write(_reply(self._redis.get(VERSION_KEY)))) or b""))
                alive = self._table.by_identity
                dead: list[bytes] = []
                for chunk_id, value in page.items():
                    for packed in unpack_holders(value):
                        if (packed.number, packed.incarnation) not in alive:
                            dead += [chunk_id, pack_identity(packed.number, packed.incarnation)]
                num_swept += await self._write(self._connection.run(scripts.PRUNE, [key], dead)) if dead else 0
            if cursor == 0:
                return num_swept

    async def _write(self, call: Awaitable[T]) -> T:
        return await self._connection.within(self._options.write_timeout_s, call)


def _by_bucket(chunk_ids: Sequence[bytes]) -> dict[int, list[int]]:
    """Bucket -> positions in `chunk_ids`."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, chunk_id in enumerate(chunk_ids):
        places[bucket_of(chunk_id)].append(place)
    return dict(places)


def _text(incarnation: int) -> str:
    return f"{incarnation:020d}"


async def _reply(call: Any) -> Any:
    """redis-py types its commands as perhaps not awaitable; with the asyncio client they always are."""
    return await call
