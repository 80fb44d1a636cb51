"""What a disk tier holds, and how much of its capacity is taken. In memory; thread-safe; never does I/O."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.errors import IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Miss
from lmcache_core.storage.disk.layout import charged_bytes
from lmcache_core.storage.eviction import EvictionPolicy, RecentEvictions


@dataclass(frozen=True, eq=False)
class DiskEntry:
    """One record on disk. Compared by identity: a rewritten record has another entry.

    Attributes:
        head_bytes: Its head.
        payload_bytes: Its payload.
        lossy: Whether its encoding loses something.
    """

    head_bytes: int
    payload_bytes: int
    lossy: bool

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record."""
        return self.head_bytes + self.payload_bytes

    @property
    def charge(self) -> int:
        """What it takes of the capacity."""
        return charged_bytes(self.record_bytes)


class DiskIndex:
    """Entries in the policy's order; entries and reservations together never exceed the capacity.

    Args:
        capacity_bytes: Bound on what is charged.
        policy: Which entries go first; belongs to this index.
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy) -> None:
        self.capacity_bytes = capacity_bytes
        self._policy = policy
        self._lock = threading.Lock()
        self._entries: dict[ChunkKey, DiskEntry] = {}
        self._entry_bytes = 0
        self._reserved_bytes = 0
        self._recent = RecentEvictions()

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which chunks are held. Does not count as an access."""
        with self._lock:
            return [key in self._entries for key in keys]

    def find(self, key: ChunkKey) -> DiskEntry | Miss:
        """The entry to read, which counts as an access, or why there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return self._recent.miss(key)
            self._policy.on_access(key)
            return entry

    def wants(self, key: ChunkKey, lossy: bool) -> bool:
        """Whether a record would be kept: there is none, or one that loses something where the new one does not."""
        with self._lock:
            held = self._entries.get(key)
            return held is None or (held.lossy and not lossy)

    def reserve(self, charge: int) -> bool:
        """Take a part of the capacity for a file that is about to be written; False when it is not free."""
        with self._lock:
            if self._entry_bytes + self._reserved_bytes + charge > self.capacity_bytes:
                return False
            self._reserved_bytes += charge
            return True

    def charge_anyway(self, charge: int) -> None:
        """Take a part of the capacity for a file that lies there already."""
        with self._lock:
            self._reserved_bytes += charge

    def unreserve(self, charge: int) -> None:
        """Give a reserved part back: its file is gone."""
        with self._lock:
            self._reserved_bytes -= charge

    def commit(self, key: ChunkKey, entry: DiskEntry) -> None:
        """The file has its name: its reservation becomes an entry, in the place of an older one."""
        with self._lock:
            if key in self._entries:
                self._pop(key)
            self._reserved_bytes -= entry.charge
            self._insert(key, entry)

    def restore(self, found: Sequence[tuple[ChunkKey, DiskEntry]]) -> None:
        """Take over records found on disk, coldest first; they may exceed the capacity."""
        with self._lock:
            for key, entry in found:
                self._insert(key, entry)

    def victim(self) -> ChunkKey | None:
        """The chunk to give up next; nothing changes."""
        with self._lock:
            return next(self._policy.victims(), None)

    def evict(self, key: ChunkKey) -> None:
        """Forget a chunk whose file made room."""
        with self._lock:
            self._pop(key)
            self._recent.add(key)

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
            self._pop(key)
            return held

    def keys(self) -> list[ChunkKey]:
        """Names of all chunks held now."""
        with self._lock:
            return list(self._entries)

    def held(self) -> list[tuple[ChunkKey, int]]:
        """Name and size (whole record, bytes) of every chunk held now."""
        with self._lock:
            return [(key, entry.record_bytes) for key, entry in self._entries.items()]

    @property
    def is_over_capacity(self) -> bool:
        """Whether what was found on disk exceeds the capacity."""
        with self._lock:
            return self._entry_bytes + self._reserved_bytes > self.capacity_bytes

    def stats(self) -> dict[str, int]:
        """Figures; `used_bytes` counts whole file-system blocks, and everything that the tier has on disk."""
        with self._lock:
            return {
                "num_chunks": len(self._entries),
                "used_bytes": self._entry_bytes + self._reserved_bytes,
                "capacity_bytes": self.capacity_bytes,
                "reserved_bytes": self._reserved_bytes,
            }

    def check_integrity(self) -> None:
        """Compare the books.

        Raises:
            IntegrityError: They do not balance.
        """
        with self._lock:
            charged = sum(entry.charge for entry in self._entries.values())
            if charged != self._entry_bytes or self._reserved_bytes < 0:
                raise IntegrityError(f"entries charge {charged} bytes, books say {self._entry_bytes}; reserved {self._reserved_bytes}")
            if len(self._policy) != len(self._entries):
                raise IntegrityError(f"{len(self._entries)} entries, but the policy knows {len(self._policy)}")

    def _insert(self, key: ChunkKey, entry: DiskEntry) -> None:
        self._entries[key] = entry
        self._entry_bytes += entry.charge
        self._policy.on_insert(key, entry.charge)
        self._recent.discard(key)

    def _pop(self, key: ChunkKey) -> None:
        self._entry_bytes -= self._entries.pop(key).charge
        self._policy.on_remove(key)
