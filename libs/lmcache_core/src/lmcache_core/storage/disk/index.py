"""The chunks that a disk tier holds, and its use of capacity. In memory; thread-safe; does no
I/O.
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
FULL_S = 300.0
"""How long a volume that was full counts as no larger than what was held then."""
MAX_FULL_IN_VAIN = 3
"""How often chunks are given up for a full volume before a write succeeds."""

_NEVER_STORED = Miss(MissReason.NEVER_STORED)


@dataclass(frozen=True, eq=False)
class DiskEntry:
    """One record on disk. Compared by identity: a rewritten record has a new entry.

    Attributes:
        stored_at: When it was stored, seconds since the epoch; None in a new entry: the index sets
            it.
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
        """Return how much of the capacity it takes."""
        return charged_bytes(self.record_bytes)


class DiskIndex:
    """Entries in the policy's order. Entries and reservations together never exceed the capacity,
    nor those of a tenant its quota.

    A volume may be smaller than the capacity, or shared with other writers. One that was full
    counts as large as what was held then, for `FULL_S`, so that each write evicts what it needs.

    Args:
        capacity_bytes: Bound on the bytes charged.
        policy: Eviction order; must not be shared with another index.
        clock: Seconds since the epoch, for the age of entries.
        monotonic: Seconds, monotonic.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy,
        limits: TierLimits | None = None,
        clock: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._ledger = Ledger(policy, limits, clock)
        self._clock = clock
        self._monotonic = monotonic
        self._volume_bytes: int | None = None
        self._full_at = 0.0
        self._num_full_in_vain = 0
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
        """Return the entries to read, or the reasons why there are none.

        Counts as an access to all of them, in reverse order: the head of a chain of chunks then
        counts as the most recent.
        """
        with self._lock:
            for key in reversed(keys):
                if self._live(key) is not None:
                    self._ledger.access(key)
            return [self._live(key) or self._miss(key) for key in keys]

    def peek_many(self, keys: Sequence[ChunkKey]) -> list[DiskEntry | Miss]:
        """Like `find_many`, but without counting an access, and reporting what `note_damage`
        recorded for chunks that have not been stored again since.
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
        """Return the entry to read, counting an access, or the reason why there is none."""
        return self.find_many([key])[0]

    def wants(self, key: ChunkKey, lossy: bool) -> bool:
        """Return whether a record would be stored: there is none yet, or only a lossy one and the
        new one is lossless.
        """
        with self._lock:
            held = self._live(key)
            return held is None or (held.lossy and not lossy)

    def could_hold(self, tenant: str, charge: int) -> bool:
        """Return whether an entry of that size could fit if everything else were evicted. Counts a
        refusal if the quota is the reason why not.
        """
        quota = self._ledger.quota(tenant)
        if quota is None or charge <= quota:
            return charge <= self._room_bytes
        self.refuse()
        return False

    def is_over_quota(self, tenant: str, charge: int = 0) -> bool:
        """Return whether `charge` more bytes would take the tenant's entries and reservations over
        its quota.
        """
        with self._lock:
            reserved = self._tenants_reserved_bytes.get(tenant, 0)
            return self._ledger.is_over_quota(tenant, reserved + charge)

    def reserve(self, charge: int, tenant: str) -> bool:
        """Reserve capacity and quota for a file that is about to be written; False if not enough is
        free.
        """
        with self._lock:
            if (
                self._ledger.used_bytes + self._reserved_bytes + charge > self._room_bytes
                or self.is_over_quota(tenant, charge)
            ):
                return False
            self._reserved_bytes += charge
            self._tenants_reserved_bytes[tenant] = (
                self._tenants_reserved_bytes.get(tenant, 0) + charge
            )
            return True

    def note_full(self, charge: int) -> None:
        """Record that the volume had no room for a write of that size. Later ones evict what they
        need.

        After `MAX_FULL_IN_VAIN` times without a success nothing more is given up: others take what
        becomes free, or the volume does not tell the truth.
        """
        with self._lock:
            writing = sum(self._tenants_reserved_bytes.values())
            used = self._ledger.used_bytes + self._reserved_bytes - writing
            self._full_at = self._monotonic()
            is_lower = self._volume_bytes is None or used < self._volume_bytes
            if charge <= used and is_lower and self._num_full_in_vain < MAX_FULL_IN_VAIN:
                self._num_full_in_vain += 1
                self._volume_bytes = used

    def note_room(self) -> None:
        """Record that a write succeeded: the capacity counts again `FULL_S` after the volume was
        full.
        """
        with self._lock:
            self._num_full_in_vain = 0
            if self._volume_bytes is not None and self._monotonic() - self._full_at >= FULL_S:
                self._volume_bytes = None

    @property
    def _room_bytes(self) -> int:
        return min(self.capacity_bytes, self._volume_bytes or self.capacity_bytes)

    def charge_anyway(self, charge: int) -> None:
        """Charge a file that already exists, even beyond the capacity."""
        with self._lock:
            self._reserved_bytes += charge

    def unreserve(self, charge: int, tenant: str | None = None) -> None:
        """Return a reservation (of a tenant), or the charge of an existing file: the file is
        gone.
        """
        with self._lock:
            self._reserved_bytes -= charge
            if tenant is not None:
                self._tenants_reserved_bytes[tenant] -= charge
                if not self._tenants_reserved_bytes[tenant]:
                    del self._tenants_reserved_bytes[tenant]

    def commit(self, key: ChunkKey, entry: DiskEntry) -> None:
        """Turn the reservation of a file that now has its final name into an entry, replacing an
        older one.
        """
        with self._lock:
            if key in self._entries:
                self._pop(key)
            self.unreserve(entry.charge, key.tenant)
            self._insert(key, entry)

    def restore(self, found: Sequence[tuple[ChunkKey, DiskEntry]]) -> None:
        """Add records found on disk, coldest first, except those already held.

        They may exceed capacity and quotas.
        """
        with self._lock:
            for key, entry in found:
                if key not in self._entries:
                    self._insert(key, entry)

    def victim(self, tenant: str | None = None) -> ChunkKey | None:
        """Return the next chunk (of that tenant) to evict, without changing anything."""
        with self._lock:
            return next(self._ledger.victims(tenant), None)

    def past(self, limit: int) -> list[ChunkKey]:
        """Return expired chunks, at most `limit` of them."""
        with self._lock:
            return self._ledger.past(limit)

    def evict(self, key: ChunkKey) -> DiskEntry:
        """Drop a chunk that expired or whose file makes room, and return its entry."""
        with self._lock:
            reason = MissReason.EVICTED if self._ledger.is_live(key) else MissReason.EXPIRED
            return self._pop(key, reason)

    def refuse(self) -> None:
        """Count a chunk that is refused because of its tenant's quota."""
        with self._lock:
            self._ledger.refuse()

    def remove(self, key: ChunkKey, entry: DiskEntry | None = None) -> DiskEntry | None:
        """Drop a chunk.

        Args:
            entry: Drop it only if this is still its entry.

        Returns:
            The entry dropped; None if nothing changed.
        """
        with self._lock:
            held = self._entries.get(key)
            if held is None or (entry is not None and held is not entry):
                return None
            return self._pop(key)

    def keys(self, tenant: str | None = None) -> list[ChunkKey]:
        """Return the names of all chunks (of that tenant), expired ones included."""
        with self._lock:
            return [key for key in self._entries if tenant is None or key.tenant == tenant]

    def tenants(self) -> set[str]:
        """Return the tenants that hold anything here."""
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
        """Return whether the files found on disk exceed the capacity."""
        return self._ledger.used_bytes + self._reserved_bytes > self.capacity_bytes

    def stats(self) -> dict[str, int]:
        """Return figures; `used_bytes` counts whole file-system blocks, and everything the tier has
        on disk.
        """
        with self._lock:
            return {
                "num_chunks": len(self._entries),
                "used_bytes": self._ledger.used_bytes + self._reserved_bytes,
                "capacity_bytes": self.capacity_bytes,
                "reserved_bytes": self._reserved_bytes,
            } | self._ledger.stats()

    def check_integrity(self) -> None:
        """Check the index's accounting.

        Raises:
            IntegrityError: The totals do not add up.
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
