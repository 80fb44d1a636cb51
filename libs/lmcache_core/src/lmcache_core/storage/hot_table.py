"""What the host-memory tier holds: chunks, and the ledger over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from lmcache_core.errors import IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk, Miss
from lmcache_core.storage.eviction import Ledger


class HeldChunk(NamedTuple):
    """What there is to tell of a chunk that a tier holds.

    Attributes:
        num_bytes: Of the whole record.
        stored_at: When it was stored, seconds since the epoch; None: not known.
        num_holders: References on its memory beside the tier's own: readers, pins, writes to slower
            tiers.
        lossy: Whether its encoding has lost something.
    """

    num_bytes: int
    stored_at: float | None
    num_holders: int
    lossy: bool

    @classmethod
    def of(cls, chunk: Chunk) -> HeldChunk:
        """From a chunk that its tier holds."""
        return cls(chunk.num_bytes, chunk.stored_at, chunk.memory.get_ref_count() - 1, chunk.lossy)


class HotTable:
    """Chunks in memory, one reference held on each. Not thread-safe: the tier calls it under its
    lock.

    Args:
        ledger: Order, age and owners; belongs to this table.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._chunks: dict[ChunkKey, Chunk] = {}
        self.used_bytes = 0

    def find(self, key: ChunkKey) -> Chunk | None:
        """The chunk if it may be served; not an access."""
        chunk = self._chunks.get(key)
        return chunk if chunk is not None and self._ledger.is_live(key) else None

    def access(self, key: ChunkKey) -> None:
        """A held chunk was read."""
        self._ledger.access(key)

    def admits(self, chunk: Chunk, num_bytes: int, gone: list[ChunkKey]) -> bool:
        """Whether a chunk is to be kept. Its tenant's own chunks are given up for it as far as the
        quota demands.

        Args:
            chunk: The chunk.
            num_bytes: What it will take.
            gone: Extended by the keys that were given up.
        """
        held = self.find(chunk.key)
        if held is not None and (chunk.lossy or not held.lossy):
            return False
        tenant = chunk.key.tenant
        more_bytes = num_bytes - (0 if held is None else held.memory.metadata.phy_size)
        quota = self._ledger.quota(tenant)
        if (
            quota is not None
            and num_bytes <= quota
            and self._ledger.is_over_quota(tenant, more_bytes)
        ):
            for key in self.give_up(tenant=tenant, spared=chunk.key):
                gone.append(key)
                if not self._ledger.is_over_quota(tenant, more_bytes):
                    break
        is_admitted = not self._ledger.is_over_quota(tenant, more_bytes)
        if not is_admitted:
            self._ledger.refuse()
        return is_admitted

    def is_over_quota(self, tenant: str, more_bytes: int) -> bool:
        """See `Ledger.is_over_quota`."""
        return self._ledger.is_over_quota(tenant, more_bytes)

    def could_never_hold(self, tenant: str, num_bytes: int) -> bool:
        """Whether so much is more than that tenant's whole quota; counted as refused by it."""
        quota = self._ledger.quota(tenant)
        is_more = quota is not None and num_bytes > quota
        if is_more:
            self._ledger.refuse()
        return is_more

    def put(self, chunk: Chunk) -> None:
        """Hold a chunk that has been admitted, in the place of an older one; its reference
        passes to the table.
        """
        self.remove(chunk.key)
        taken = chunk.memory.metadata.phy_size
        self._chunks[chunk.key] = chunk
        self.used_bytes += taken
        self._ledger.add(chunk.key, taken, chunk.stored_at)

    def remove(self, key: ChunkKey) -> bool:
        """Forget a chunk; whether it was held."""
        if key not in self._chunks:
            return False
        self._ledger.remove(key)
        self._drop(key)
        return True

    def expire(self, limit: int, keys: Sequence[ChunkKey] = ()) -> list[ChunkKey]:
        """Forget chunks whose time is over: all of `keys`, and at most `limit` others. Those
        with readers too: nothing waits for them.
        """
        if not self._ledger.has_ttl:
            return []
        past = self._ledger.past(limit)
        past += [key for key in keys if key in self._chunks and not self._ledger.is_live(key)]
        gone = list(dict.fromkeys(past))
        for key in gone:
            self._ledger.expire(key)
            self._drop(key)
        return gone

    def give_up(
        self, limit: int | None = None, tenant: str | None = None, spared: ChunkKey | None = None
    ) -> Iterator[ChunkKey]:
        """Forget chunks one by one: first those whose time is over, then, in the policy's order,
        those that nobody references.

        Args:
            limit: How many are looked at; None: all.
            tenant: Whose chunks go, for its quota; None: everybody's.
            spared: Never given up.

        Yields:
            What has just been forgotten.
        """
        for key in self._ledger.past(len(self._chunks) if limit is None else limit):
            self._ledger.expire(key)
            self._drop(key)
            yield key
        for key in islice(self._ledger.victims(tenant), limit):
            if key == spared or self._chunks[key].memory.get_ref_count() > 1:
                continue
            self._ledger.evict(key)
            self._drop(key)
            yield key

    def coldest_first(self) -> list[ChunkKey]:
        """Return everything held, roughly what would be given up first first."""
        return self._ledger.coldest_first()

    def all_keys(self) -> list[ChunkKey]:
        """Return everything held, chunks whose time is over included."""
        return list(self._chunks)

    def miss(self, key: ChunkKey) -> Miss:
        """The miss to report for a chunk that is not held."""
        return self._ledger.miss(key)

    def stats(self) -> dict[str, int]:
        """Figures of table and ledger."""
        return {
            "num_chunks": len(self._chunks),
            "used_bytes": self.used_bytes,
        } | self._ledger.stats()

    def check_integrity(self) -> None:
        """Compare the books.

        Raises:
            IntegrityError: They do not balance.
        """
        sizes = {key: chunk.memory.metadata.phy_size for key, chunk in self._chunks.items()}
        if sum(sizes.values()) != self.used_bytes:
            raise IntegrityError(
                f"chunks hold {sum(sizes.values())} bytes, books say {self.used_bytes}"
            )
        self._ledger.check_integrity(sizes)
        for key, chunk in self._chunks.items():
            if chunk.memory.get_ref_count() < 1:
                raise IntegrityError(f"chunk {key.key.chunk_hash} is held without a reference")

    def _drop(self, key: ChunkKey) -> None:
        chunk = self._chunks.pop(key)
        self.used_bytes -= chunk.memory.metadata.phy_size
        chunk.memory.ref_count_down()
