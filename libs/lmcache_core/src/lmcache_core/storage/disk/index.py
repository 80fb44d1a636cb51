"""What a disk tier holds, and how much of its capacity is taken. In memory; thread-safe; never
does I/O.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmcache_core.errors import IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage.disk.layout import charged_bytes
from lmcache_core.storage.eviction import Clock, EvictionPolicy, Ledger, TierLimits
from lmcache_core.storage.eviction.ledger import RecentEvictions

LISTED_AT_ONCE = 4096

_NEVER_STORED = Miss(MissReason.NEVER_STORED)


@dataclass(frozen=True, eq=False)
class DiskEntry:
    """One record on disk. Compared by identity: a rewritten record has another entry.

    Attributes:
        head_bytes: Its head.
        payload_bytes: Its payload.
        lossy: Whether its encoding loses something.
        stored_at: When it was stored, seconds since the epoch; None, until the index holds it,
            means then.
    """

    head_bytes: int
    payload_bytes: int
    lossy: bool
    stored_at: float | None = None

    @property
    def record_bytes(self) -> int:
        """Return the size of the whole record."""
        return self.head_bytes + self.payload_bytes

    @property
    def charge(self) -> int:
        """Return what it takes of the capacity."""
        return charged_bytes(self.record_bytes)


class DiskIndex:
    """Entries in the policy's order; entries and reservations together never exceed the capacity,
    nor those of a tenant its quota.

    Args:
        capacity_bytes: Bound on what is charged.
        policy: Which entries go first; belongs to this index.
        limits: What is not kept although there is room.
        clock: Tells the age of entries.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy,
        limits: TierLimits | None = None,
        clock: Clock = time.time,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._ledger = Ledger(policy, limits, clock)
        self._clock = clock
        self._lock = threading.RLock()
        self._entries: dict[ChunkKey, DiskEntry] = {}
        self._damaged = RecentEvictions()
        self._reserved_bytes = 0
        self._tenants_reserved_bytes: dict[str, int] = {}

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks are held. Does not count as an access."""
        with self._lock:
            return [self._live(key) is not None for key in keys]

    def find_many(self, keys: Sequence[ChunkKey]) -> list[DiskEntry | Miss]:
        """Return the entries to read, or why there are none.

        Counts as an access to all of them, the last one first: of a chain of chunks the head is
        then the most recent.
        """
        with self._lock:
            for key in reversed(keys):
                if self._live(key) is not None:
                    self._ledger.access(key)
            return [self._live(key) or self._miss(key) for key in keys]

    def peek_many(self, keys: Sequence[ChunkKey]) -> list[DiskEntry | Miss]:
        """Like `find_many`, but not an access, and what `note_damage` was told of one that has
        not come back since.
        """
        with self._lock:
            found = [self._live(key) or self._miss(key) for key in keys]
            return [
                self._damaged.miss(key) if entry == _NEVER_STORED else entry
                for key, entry in zip(keys, found, strict=True)
            ]

    def note_damage(self, key: ChunkKey, reason: MissReason = MissReason.CORRUPT) -> None:
        """Remember why a record is no longer held: `corrupt`, or `unavailable` if it cannot be
        read.
        """
        with self._lock:
            self._damaged.add(key, reason)

    def find(self, key: ChunkKey) -> DiskEntry | Miss:
        """Return the entry to read, which counts as an access, or why there is none."""
        return self.find_many([key])[0]

    def wants(self, key: ChunkKey, lossy: bool) -> bool:
        """Return whether a record would be kept: there is none, or one that loses something where
        the new one does not.
        """
        with self._lock:
            held = self._live(key)
            return held is None or (held.lossy and not lossy)

    def could_hold(self, tenant: str, charge: int) -> bool:
        """Return whether an entry of that size fits at all, whatever is given up for it; counted,
        if the quota is why not.
        """
        quota = self._ledger.quota(tenant)
        if quota is None or charge <= quota:
            return charge <= self.capacity_bytes
        self.refuse()
        return False

    def is_over_quota(self, tenant: str, charge: int = 0) -> bool:
        """Return whether the tenant's entries and reservations would exceed its quota with so much
        more.
        """
        with self._lock:
            reserved = self._tenants_reserved_bytes.get(tenant, 0)
            return self._ledger.is_over_quota(tenant, reserved + charge)

    def reserve(self, charge: int, tenant: str) -> bool:
        """Take a part of the capacity and of a quota for a file that is about to be written;
        False when it is not free.
        """
        with self._lock:
            if (
                self._ledger.used_bytes + self._reserved_bytes + charge > self.capacity_bytes
                or self.is_over_quota(tenant, charge)
            ):
                return False
            self._reserved_bytes += charge
            self._tenants_reserved_bytes[tenant] = (
                self._tenants_reserved_bytes.get(tenant, 0) + charge
            )
            return True

    def charge_anyway(self, charge: int) -> None:
        """Take a part of the capacity for a file that lies there already."""
        with self._lock:
            self._reserved_bytes += charge

    def unreserve(self, charge: int, tenant: str | None = None) -> None:
        """Give a part that was reserved (for a tenant), or charged anyway, back: its file is
        gone.
        """
        with self._lock:
            self._reserved_bytes -= charge
            if tenant is not None:
                self._tenants_reserved_bytes[tenant] -= charge
                if not self._tenants_reserved_bytes[tenant]:
                    del self._tenants_reserved_bytes[tenant]

    def commit(self, key: ChunkKey, entry: DiskEntry) -> None:
        """Turn the reservation of a file that now has its name into an entry, in the place of an
        older one.
        """
        with self._lock:
            if key in self._entries:
                self._pop(key)
            self.unreserve(entry.charge, key.tenant)
            self._insert(key, entry)

    def restore(self, found: Sequence[tuple[ChunkKey, DiskEntry]]) -> None:
        """Take over records found on disk, coldest first, but for those that are held already.

        They may exceed capacity and quotas.
        """
        with self._lock:
            for key, entry in found:
                if key not in self._entries:
                    self._insert(key, entry)

    def victim(self, tenant: str | None = None) -> ChunkKey | None:
        """Return the chunk (of that tenant) to give up next; nothing changes."""
        with self._lock:
            return next(self._ledger.victims(tenant), None)

    def past(self, limit: int) -> list[ChunkKey]:
        """Return chunks whose time is over, at most `limit` of them."""
        with self._lock:
            return self._ledger.past(limit)

    def evict(self, key: ChunkKey) -> DiskEntry:
        """Forget a held chunk whose file makes room, or whose time is over; what was forgotten."""
        with self._lock:
            reason = MissReason.EVICTED if self._ledger.is_live(key) else MissReason.EXPIRED
            return self._pop(key, reason)

    def refuse(self) -> None:
        """Count a chunk that is not kept because of its tenant's quota."""
        with self._lock:
            self._ledger.refuse()

    def remove(self, key: ChunkKey, entry: DiskEntry | None = None) -> DiskEntry | None:
        """Forget a chunk.

        Args:
            key: Its name.
            entry: Only if this is still its entry.

        Returns:
            What was forgotten; None means that nothing changed.
        """
        with self._lock:
            held = self._entries.get(key)
            if held is None or (entry is not None and held is not entry):
                return None
            return self._pop(key)

    def keys(self, tenant: str | None = None) -> list[ChunkKey]:
        """Return the names of all chunks (of that tenant) that lie there, those whose time is over
        included.
        """
        with self._lock:
            return [key for key in self._entries if tenant is None or key.tenant == tenant]

    def tenants(self) -> set[str]:
        """Return the tenants that have something here."""
        with self._lock:
            return {key.tenant for key in self._entries}

    def held(self) -> list[tuple[ChunkKey, int]]:
        """Return name and size (whole record, bytes) of every chunk that would be served now."""
        with self._lock:
            everything = list(self._entries.items())
        found: list[tuple[ChunkKey, int]] = []
        # An event loop may be waiting for the lock.
        for begin in range(0, len(everything), LISTED_AT_ONCE):
            with self._lock:
                found += [
                    (key, entry.record_bytes)
                    for key, entry in everything[begin : begin + LISTED_AT_ONCE]
                    if self._entries.get(key) is entry and self._ledger.is_live(key)
                ]
        return found

    @property
    def is_over_capacity(self) -> bool:
        """Return whether what was found on disk exceeds the capacity."""
        return self._ledger.used_bytes + self._reserved_bytes > self.capacity_bytes

    def stats(self) -> dict[str, int]:
        """Return figures; `used_bytes` counts whole file-system blocks, and everything that the
        tier has on disk.
        """
        with self._lock:
            return {
                "num_chunks": len(self._entries),
                "used_bytes": self._ledger.used_bytes + self._reserved_bytes,
                "capacity_bytes": self.capacity_bytes,
                "reserved_bytes": self._reserved_bytes,
            } | self._ledger.stats()

    def check_integrity(self) -> None:
        """Compare the books.

        Raises:
            IntegrityError: They do not balance.
        """
        with self._lock:
            sizes = {key: entry.charge for key, entry in self._entries.items()}
            reserved = self._tenants_reserved_bytes.values()
            if not 0 <= sum(reserved) <= self._reserved_bytes or 0 in reserved:
                raise IntegrityError(
                    f"tenants have reserved {self._tenants_reserved_bytes}, all together"
                    f" {self._reserved_bytes}"
                )
            self._ledger.check_integrity(sizes)

    def _live(self, key: ChunkKey) -> DiskEntry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and self._ledger.is_live(key) else None

    def _miss(self, key: ChunkKey) -> Miss:
        return Miss(MissReason.EXPIRED) if key in self._entries else self._ledger.miss(key)

    def _insert(self, key: ChunkKey, entry: DiskEntry) -> None:
        if entry.stored_at is None:
            entry = replace(entry, stored_at=self._clock())
        self._entries[key] = entry
        self._damaged.discard(key)
        self._ledger.add(key, entry.charge, entry.stored_at)

    def _pop(self, key: ChunkKey, reason: MissReason | None = None) -> DiskEntry:
        entry = self._entries.pop(key)
        self._ledger.remove(key, entry.charge, reason)
        return entry
