"""The index in this process: for a single replica, for evaluation, for tests."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lmcache_core.lookup import Holder, InstanceKind
from lmcache_core.lookup.messages import EventsAck, InstanceEntry, StatsAnswer
from lmcache_core.security import SHARED_OWNER
from typing_extensions import override

from lmcache_lookup.index.base import (
    MAX_STORED_HOLDERS_PER_CHUNK,
    EventBatch,
    IndexEvent,
    LeaseClaim,
    LookupIndex,
    check_places,
)

SWEEP_CHUNKS: Final = 1024
DROPS_PER_LOOK: Final = 64
"""Chunks that the largest tenant loses before all tenants are compared again, and that a full
tenant loses before it is searched for dead ones again.
"""


@dataclass(slots=True)
class _Lease:
    """One incarnation of one instance. Entries refer to it, so that ending it invalidates them
    all.
    """

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


@dataclass(slots=True)
class _TenantChunks:
    """Chunks of one tenant, the one stored longest ago first.

    Sweeping moves them from `unswept` to `swept`, so that it can stop anywhere: all of `swept` was
    stored before all of `unswept`. A single dict would have to skip every emptied slot at its front
    to find the first chunk.

    Attributes:
        drops_left: Drops before the next search for dead entries.
    """

    swept: OrderedDict[bytes, _Entries] = field(default_factory=OrderedDict)
    unswept: OrderedDict[bytes, _Entries] = field(default_factory=OrderedDict)
    num_entries: int = 0
    drops_left: int = 0

    def __len__(self) -> int:
        return len(self.swept) + len(self.unswept)

    def get(self, chunk_id: bytes) -> _Entries | None:
        return self.unswept.get(chunk_id) or self.swept.get(chunk_id)

    def pop(self, chunk_id: bytes) -> _Entries | None:
        entries = self.unswept.pop(chunk_id, None) or self.swept.pop(chunk_id, None)
        self.num_entries -= len(entries or ())
        return entries

    def drop_oldest(self) -> None:
        _, entries = (self.swept or self.unswept).popitem(last=False)
        self.num_entries -= len(entries)


class EmbeddedIndex(LookupIndex):
    """Bounded dictionaries.

    A tenant with too many entries loses dead ones, or else the chunk stored longest ago. If there
    are too many in total, one of the largest tenants does; which one is determined again after 64
    such losses.

    Args:
        max_chunks: Bound on entries of all tenants. A chunk counts once for each holder and tier.
        max_instances: Bound on leases of tenants, and on shared ones.
        max_chunks_per_tenant: Bound on entries of one tenant; None: only the common one.
        max_instances_per_tenant: Bound on leases of one owner; None: only the common one.
    """

    name = "embedded"

    def __init__(
        self,
        max_chunks: int,
        max_instances: int,
        max_chunks_per_tenant: int | None = None,
        max_instances_per_tenant: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_chunks = max_chunks
        self._max_instances = max_instances
        self._max_chunks_per_tenant = max_chunks_per_tenant or max_chunks
        self._max_instances_per_tenant = max_instances_per_tenant or max_instances
        self._clock = clock
        self._leases: dict[tuple[str, str], _Lease] = {}
        self._tenants: dict[str, _TenantChunks] = {}
        self._num_entries = 0
        self._largest = _TenantChunks()
        self._drops_left = 0
        self._to_sweep: deque[str] = deque()
        self._cleared: deque[_TenantChunks] = deque()

    @override
    async def open(self) -> None:
        """Do nothing: there is nothing to prepare."""

    @override
    async def close(self) -> None:
        self._leases.clear()
        self._tenants.clear()
        self._cleared.clear()
        self._num_entries = 0

    @override
    async def ping(self) -> None:
        """Do nothing: the index is always available."""

    @override
    async def renew(self, owner: str, claim: LeaseClaim) -> EventsAck:
        key = (owner, claim.instance)
        lease = self._leases.get(key)
        alive = lease is not None and self._is_alive(lease)
        if lease is not None and alive and claim.incarnation < lease.incarnation:
            return EventsAck(0, True)
        if lease is None or not alive or claim.incarnation != lease.incarnation:
            self._make_room(key)
            self._drop(key)
            lease = self._leases[key] = _Lease(
                owner, claim.instance, claim.kind, claim.incarnation, 0.0
            )
        lease.kind = claim.kind
        lease.expires_at = self._clock() + claim.ttl_ms / 1000
        return EventsAck(lease.next_sequence, lease.resync)

    @override
    async def end(self, owner: str, instance: str, incarnation: int | None = None) -> bool:
        lease = self._leases.get((owner, instance))
        if lease is None or incarnation not in (None, lease.incarnation):
            return False
        alive = self._is_alive(lease)
        self._drop((owner, instance))
        return alive

    @override
    async def apply(self, owner: str, batch: EventBatch) -> EventsAck:
        lease = self._leases.get((owner, batch.instance))
        if (
            lease is None
            or not self._is_alive(lease)
            or lease.incarnation != batch.incarnation
            or lease.resync
        ):
            return EventsAck(0, True)
        if batch.first_sequence > lease.next_sequence:
            return EventsAck(lease.next_sequence, True)
        for event in batch.events[lease.next_sequence - batch.first_sequence :]:
            self._take(lease, event)
            lease.next_sequence += 1
        return EventsAck(lease.next_sequence, False)

    @override
    async def holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        chunks = self._tenants.get(tenant) or _TenantChunks()
        return [self._holders_of(chunks.get(chunk_id) or {}) for chunk_id in chunk_ids]

    @override
    async def instances(self, owner: str) -> list[InstanceEntry]:
        now = self._clock()
        return [
            InstanceEntry(
                lease.instance,
                lease.kind,
                lease.incarnation,
                lease.next_sequence,
                int((lease.expires_at - now) * 1000),
            )
            for _, lease in sorted(self._leases.items())
            if lease.owner == owner and self._is_alive(lease)
        ]

    @override
    async def evict(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        chunks = self._tenants.get(tenant) or _TenantChunks()
        before = chunks.num_entries
        num_known = sum(chunks.pop(chunk_id) is not None for chunk_id in chunk_ids)
        self._num_entries += chunks.num_entries - before
        return num_known

    @override
    async def clear(self, tenant: str) -> None:
        # The sweep frees the memory in small steps.
        chunks = self._tenants.pop(tenant, None)
        if chunks:
            self._num_entries -= chunks.num_entries
            self._cleared.append(chunks)
        self._largest = _TenantChunks()
        for lease in self._leases.values():
            is_concerned = lease.owner in (tenant, SHARED_OWNER) or lease.kind == "storage"
            lease.resync = lease.resync or is_concerned

    @override
    async def sweep(self) -> int:
        num_swept = 0
        for _ in range(SWEEP_CHUNKS):
            if self._cleared:
                self._cleared[0].drop_oldest()
                if not self._cleared[0]:
                    self._cleared.popleft()
            elif self._to_sweep:
                num_swept += self._sweep_one(self._to_sweep[0])
            else:
                self._to_sweep.extend(self._tenants)
                break
        return num_swept

    @override
    async def stats(self, tenant: str) -> StatsAnswer:
        num_instances = len(await self.instances(tenant) + await self.instances(SHARED_OWNER))
        num_chunks = len(self._tenants.get(tenant) or ())
        return StatsAnswer(self.name, False, num_chunks, num_instances)

    @override
    async def tenants(self) -> list[str]:
        return sorted(tenant for tenant, chunks in self._tenants.items() if chunks)

    def _is_alive(self, lease: _Lease) -> bool:
        return not lease.ended and self._clock() < lease.expires_at

    def _drop(self, key: tuple[str, str]) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            lease.ended = True

    def _make_room(self, key: tuple[str, str]) -> None:
        if key in self._leases or all(self._places(key[0])):
            return
        for other in [other for other, lease in self._leases.items() if not self._is_alive(lease)]:
            self._drop(other)
        check_places(*self._places(key[0]), self._max_instances, self._max_instances_per_tenant)

    def _places(self, owner: str) -> tuple[bool, bool]:
        """Return whether there is room for one more lease, and for one of this owner."""
        num_own = sum(other == owner for other, _ in self._leases)
        num_counted = num_own if owner == SHARED_OWNER else len(self._leases)
        return num_counted < self._max_instances, num_own < self._max_instances_per_tenant

    def _take(self, lease: _Lease, event: IndexEvent) -> None:
        place = (lease.owner, lease.instance, event.tier)
        if event.op == "remove":
            chunks = self._tenants.get(event.tenant) or _TenantChunks()
            entries = chunks.get(event.chunk_id)
            if entries is not None and entries.pop(place, None) is not None:
                chunks.num_entries -= 1
                self._num_entries -= 1
                if not entries:
                    chunks.unswept.pop(event.chunk_id, None)
                    chunks.swept.pop(event.chunk_id, None)
            return
        chunks = self._tenants.setdefault(event.tenant, _TenantChunks())
        before = chunks.num_entries
        entries = chunks.pop(event.chunk_id) or {}
        entries.pop(place, None)
        if len(entries) >= MAX_STORED_HOLDERS_PER_CHUNK:
            del entries[next(iter(entries))]
        entries[place] = (lease, event.size_bytes)
        chunks.unswept[event.chunk_id] = entries
        chunks.num_entries += len(entries)
        self._num_entries += chunks.num_entries - before
        # The chunk that was just stored stays, whatever the number of its own entries.
        while chunks.num_entries > self._max_chunks_per_tenant and len(chunks) > 1:
            self._drop_one(chunks)
        while self._num_entries > self._max_chunks:
            self._find_largest(chunks.num_entries)
            if self._largest is chunks and len(chunks) == 1:
                break
            self._drop_one(self._largest)
            self._drops_left -= 1

    def _drop_one(self, chunks: _TenantChunks) -> None:
        """Make room: clear what is dead among a bounded number of chunks, or else drop the oldest
        chunk.
        """
        if not chunks.drops_left:
            chunks.drops_left = DROPS_PER_LOOK
            num_cleared = 0
            for _ in range(min(SWEEP_CHUNKS, len(chunks))):
                if not chunks.unswept:
                    chunks.swept, chunks.unswept = chunks.unswept, chunks.swept
                num_cleared += self._sweep_oldest(chunks)
            if num_cleared:
                return
        chunks.drops_left -= 1
        before = chunks.num_entries
        chunks.drop_oldest()
        self._num_entries += chunks.num_entries - before
        self.num_dropped += 1

    def _find_largest(self, num_growing: int) -> None:
        """Compare all tenants only occasionally: the result is kept while it is close enough.

        Args:
            num_growing: Entries of the tenant that has just stored one.
        """
        fair_share = self._num_entries / len(self._tenants)
        too_small = max(num_growing - 1, fair_share - DROPS_PER_LOOK, 0)
        if not self._drops_left or self._largest.num_entries <= too_small:
            self._largest = max(self._tenants.values(), key=lambda chunks: chunks.num_entries)
            self._drops_left = DROPS_PER_LOOK

    def _holders_of(self, entries: _Entries) -> list[Holder]:
        return [
            Holder(instance, lease.kind, tier, size_bytes)
            for (_, instance, tier), (lease, size_bytes) in entries.items()
            if self._is_alive(lease)
        ]

    def _sweep_one(self, tenant: str) -> int:
        """Check one chunk of a tenant, or end its turn; return how many entries were cleared."""
        chunks = self._tenants.get(tenant)
        if not chunks or not chunks.unswept:
            self._to_sweep.popleft()
            if chunks is not None:
                chunks.swept, chunks.unswept = chunks.unswept, chunks.swept
                if not chunks:
                    del self._tenants[tenant]
            return 0
        return self._sweep_oldest(chunks)

    def _sweep_oldest(self, chunks: _TenantChunks) -> int:
        chunk_id, entries = chunks.unswept.popitem(last=False)
        dead = [place for place, (lease, _) in entries.items() if not self._is_alive(lease)]
        for place in dead:
            del entries[place]
        if entries:
            chunks.swept[chunk_id] = entries
        chunks.num_entries -= len(dead)
        self._num_entries -= len(dead)
        return len(dead)
