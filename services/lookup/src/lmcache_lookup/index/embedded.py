"""The index in this process: for one replica, for trying, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_core.errors import CapacityError
from lmcache_core.lookup import Holder, InstanceKind

from lmcache_lookup.index.base import (
    MAX_STORED_HOLDERS_PER_CHUNK,
    EventBatch,
    IndexEvent,
    IndexStats,
    InstanceStatus,
    LeaseClaim,
    LeaseState,
    LookupIndex,
)

SWEEP_CHUNKS: Final = 1024

_Key = tuple[str, bytes]


@dataclass(slots=True)
class _Lease:
    """One life of one instance. Entries point at it, so that ending it kills them all at once."""

    owner: str
    instance: str
    kind: InstanceKind
    incarnation: int
    expires_at: float
    next_sequence: int = 0
    resync: bool = False
    ended: bool = False


_Entries = dict[tuple[str, str, str], tuple[_Lease, int]]
"""(owner, instance, tier) -> the lease it was stored under, size in bytes."""


class EmbeddedIndex(LookupIndex):
    """Bounded dictionaries. When full, the chunk that was stored longest ago is forgotten, which is a miss for whoever asks.

    Args:
        max_chunks: Bound on chunks, over all tenants.
        max_instances: Bound on leases.
        clock: Seconds, monotonic.
    """

    name = "embedded"

    def __init__(self, max_chunks: int, max_instances: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_chunks = max_chunks
        self._max_instances = max_instances
        self._clock = clock
        self._leases: dict[tuple[str, str], _Lease] = {}
        self._chunks: dict[_Key, _Entries] = {}
        self._to_sweep: Iterator[_Key] = iter(())

    async def open(self) -> None:
        """Nothing to get ready."""

    async def close(self) -> None:
        """Forget everything."""
        self._leases.clear()
        self._chunks.clear()

    async def ping(self) -> None:
        """Always there."""

    async def renew(self, owner: str, claim: LeaseClaim) -> LeaseState:
        """See `LookupIndex.renew`."""
        key = (owner, claim.instance)
        lease = self._leases.get(key)
        alive = lease is not None and self._is_alive(lease)
        if lease is not None and alive and claim.incarnation < lease.incarnation:
            return LeaseState(0, True)
        if lease is None or not alive or claim.incarnation != lease.incarnation:
            self._make_room(key)
            self._drop(key)
            lease = self._leases[key] = _Lease(owner, claim.instance, claim.kind, claim.incarnation, 0.0)
        lease.expires_at = self._clock() + claim.ttl_ms / 1000
        return LeaseState(lease.next_sequence, lease.resync)

    async def end(self, owner: str, instance: str, incarnation: int | None = None) -> bool:
        """See `LookupIndex.end`."""
        lease = self._leases.get((owner, instance))
        if lease is None or incarnation not in (None, lease.incarnation):
            return False
        alive = self._is_alive(lease)
        self._drop((owner, instance))
        return alive

    async def apply(self, owner: str, batch: EventBatch) -> LeaseState:
        """See `LookupIndex.apply`."""
        lease = self._leases.get((owner, batch.instance))
        if lease is None or not self._is_alive(lease) or lease.incarnation != batch.incarnation or lease.resync:
            return LeaseState(0, True)
        if batch.first_sequence > lease.next_sequence:
            return LeaseState(lease.next_sequence, True)
        for event in batch.events[lease.next_sequence - batch.first_sequence :]:
            self._take(lease, event)
            lease.next_sequence += 1
        return LeaseState(lease.next_sequence, False)

    async def holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        """See `LookupIndex.holders`."""
        return [self._holders_of(self._chunks.get((tenant, chunk_id), {})) for chunk_id in chunk_ids]

    async def instances(self, owner: str) -> list[InstanceStatus]:
        """See `LookupIndex.instances`."""
        now = self._clock()
        return [
            InstanceStatus(lease.instance, lease.kind, lease.incarnation, lease.next_sequence, int((lease.expires_at - now) * 1000))
            for _, lease in sorted(self._leases.items())
            if lease.owner == owner and self._is_alive(lease)
        ]

    async def evict(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        """See `LookupIndex.evict`."""
        return sum(self._chunks.pop((tenant, chunk_id), None) is not None for chunk_id in chunk_ids)

    async def clear(self, tenant: str) -> None:
        """See `LookupIndex.clear`."""
        self._chunks = {key: entries for key, entries in self._chunks.items() if key[0] != tenant}
        for lease in self._leases.values():
            lease.resync = lease.resync or lease.owner == tenant

    async def sweep(self) -> int:
        """See `LookupIndex.sweep`: looks at 1024 chunks a call."""
        num_swept = 0
        for _ in range(SWEEP_CHUNKS):
            key = next(self._to_sweep, None)
            if key is None:
                self._to_sweep = iter(list(self._chunks))
                break
            num_swept += self._prune(key)
        return num_swept

    async def stats(self, tenant: str) -> IndexStats:
        """See `LookupIndex.stats`."""
        num_instances = len(await self.instances(tenant))
        return IndexStats(sum(key[0] == tenant for key in self._chunks), num_instances)

    async def tenants(self) -> list[str]:
        """See `LookupIndex.tenants`."""
        return sorted({tenant for tenant, _ in self._chunks})

    def _is_alive(self, lease: _Lease) -> bool:
        return not lease.ended and self._clock() < lease.expires_at

    def _drop(self, key: tuple[str, str]) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            lease.ended = True

    def _make_room(self, key: tuple[str, str]) -> None:
        if key in self._leases or len(self._leases) < self._max_instances:
            return
        for other in [other for other, lease in self._leases.items() if not self._is_alive(lease)]:
            self._drop(other)
        if len(self._leases) >= self._max_instances:
            raise CapacityError(f"{self._max_instances} instances hold leases already; raise max_instances")

    def _take(self, lease: _Lease, event: IndexEvent) -> None:
        key = (event.tenant, event.chunk_id)
        place = (lease.owner, lease.instance, event.tier)
        if event.op == "remove":
            entries = self._chunks.get(key)
            if entries is not None and entries.pop(place, None) is not None and not entries:
                del self._chunks[key]
            return
        entries = self._chunks.pop(key, None) or {}
        entries.pop(place, None)
        if len(entries) >= MAX_STORED_HOLDERS_PER_CHUNK:
            del entries[next(iter(entries))]
        entries[place] = (lease, event.size_bytes)
        self._chunks[key] = entries
        if len(self._chunks) > self._max_chunks:
            del self._chunks[next(iter(self._chunks))]

    def _holders_of(self, entries: _Entries) -> list[Holder]:
        return [
            Holder(instance, lease.kind, tier, size_bytes)
            for (_, instance, tier), (lease, size_bytes) in entries.items()
            if self._is_alive(lease)
        ]

    def _prune(self, key: _Key) -> int:
        entries = self._chunks.get(key)
        if entries is None:
            return 0
        dead = [place for place, (lease, _) in entries.items() if not self._is_alive(lease)]
        for place in dead:
            del entries[place]
        if not entries:
            del self._chunks[key]
        return len(dead)
