"""The host-memory tier: chunks in one arena, shared by the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from lmcache_core._typing import override
from lmcache_core.errors import IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryAllocatorInterface, MemoryFormat, MemoryObj
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.names import MEMORY_TIER
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import OnRemoved, StorageBackend
from lmcache_core.storage.eviction import Clock, EvictionPolicy, Ledger, TierLimits
from lmcache_core.telemetry.request_context import step

if TYPE_CHECKING:
    import torch

MAX_VICTIMS_PER_ALLOCATION = 1024
"""Chunks examined before an allocation gives up; the next one continues from there."""
RECEIVING_SHARE = 2
"""Payloads being received for one tenant may hold at most one part in this many of the memory."""
UNASKED_SHARE = 64
"""A payload is unusually large if it takes more than one part in this many of the memory, and more
than any chunk that has been held here before.
"""
ENVELOPE_SHARE = 8
MIN_ENVELOPE_BYTES = 4096
"""Some encodings are larger than what they encode: by one part in `ENVELOPE_SHARE`, and this."""
MAX_FREED_NOTES = 1024
"""Payloads noted as being received although their memory has been freed, before those are looked
for.
"""
KEPT_SHARE = 8
"""One part in this many of the memory is never lent to payloads being received."""
GAPS_SHARE = 8
"""To make room for an announced payload, chunks of its size are evicted, and as much again but at
most one part in this many of the memory, because the freed space may be fragmented.
"""
LISTED_AT_ONCE = 1024
"""Chunks that a listing visits before it releases the lock."""
REMOVED_AT_ONCE = 1024
"""Chunks removed before other work gets its turn."""
EVICTED_AT_ONCE_BYTES = 64 << 20
TAILS_SHARE = 32
"""Tails take at most one part in this many of the memory; beyond that they displace each other."""
TAIL_S = 60.0
"""Age at which a tail makes room for another one even where there is more: its reader has come, or
will not.
"""
MAX_EXPIRED_PER_CALL = 16
"""Expired chunks that one call drops in passing; more than one, so that they do not accumulate."""


@runtime_checkable
class BoundedMemory(Protocol):
    """An allocator with a bounded capacity."""

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes that can be allocated."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes allocated, alignment included."""


OnKept = Callable[[Chunk], None]


class HeldChunk(NamedTuple):
    """Facts about a chunk that the tier holds.

    Attributes:
        num_bytes: Size of the whole record.
        stored_at: When it was stored, seconds since the epoch; None if unknown.
        num_holders: References on its memory other than the tier's own: readers, pins, writes to
            slower tiers.
    """

    num_bytes: int
    stored_at: float | None
    num_holders: int
    lossy: bool


class Incoming:
    """Memory lent to payloads that are being received. The borrower may free it without a word, so
    the sums are upper bounds until they are recounted.
    """

    def __init__(self) -> None:
        self._lent: dict[int, tuple[MemoryObj, str | None]] = {}
        self._bytes: Counter[str | None] = Counter()
        self._recount_at = MAX_FREED_NOTES

    def recounted(self, tenant: str | None) -> int:
        """Return the bytes that are lent to a tenant, after forgetting what has been freed."""
        for memory_obj, _ in list(self._lent.values()):
            if memory_obj.get_ref_count() <= 0:
                self.discard(memory_obj)
        self._recount_at = 2 * len(self._lent) + MAX_FREED_NOTES
        return self._bytes[tenant]

    def has_room(
        self, num_bytes: int, tenant: str | None, share_bytes: int, capacity_bytes: int
    ) -> bool:
        """Return whether a tenant may borrow so much more, within its share and within what all
        may borrow of the memory together.
        """

        def fits() -> bool:
            kept_bytes = capacity_bytes // KEPT_SHARE
            return (
                self._bytes[tenant] + num_bytes <= share_bytes
                and self._bytes.total() + num_bytes <= capacity_bytes - kept_bytes
            )

        if fits():
            return True
        self.recounted(tenant)
        return fits()

    def add(self, memory_obj: MemoryObj, tenant: str | None) -> None:
        """Note that memory is lent; without a reference, until it is freed or discarded."""
        self._lent[id(memory_obj)] = memory_obj, tenant
        self._bytes[tenant] += memory_obj.metadata.phy_size
        if len(self._lent) >= self._recount_at:
            self.recounted(tenant)

    def discard(self, memory_obj: MemoryObj) -> None:
        """Forget memory that has become a chunk, if it was lent."""
        lent = self._lent.pop(id(memory_obj), None)
        if lent is not None:
            self._bytes[lent[1]] -= memory_obj.metadata.phy_size
            if not self._bytes[lent[1]]:
                del self._bytes[lent[1]]


class LocalCPUBackend(StorageBackend):
    """Chunks in host memory. The sync methods are thread-safe and never wait for I/O; the async
    ones do the same.

    The tier holds one reference on every chunk. A chunk with another reference (a reader, a write
    to a slower tier, a client's pin) is not evicted. An expired chunk is a miss, and the next call
    drops it, pinned or not.

    Args:
        allocator: The arena, which must be a `BoundedMemory`; others may allocate from it, too.
        policy: Eviction order; must not be shared with another tier.
        on_removed: Called with every key that the tier drops, in the thread that caused it, without
            a lock held.
        clock: Seconds since the epoch, for the age of chunks.
        on_kept: Called with every chunk that the tier stores, in this arena's memory, under the
            tier's lock: it must not call back.
    """

    name = MEMORY_TIER

    def __init__(
        self,
        allocator: MemoryAllocatorInterface,
        policy: EvictionPolicy,
        on_removed: OnRemoved | None = None,
        *,
        limits: TierLimits | None = None,
        clock: Clock = time.time,
        on_kept: OnKept | None = None,
    ) -> None:
        if not isinstance(allocator, BoundedMemory):
            raise TypeError(
                f"{type(allocator).__name__} has no capacity; the host-memory tier needs a bounded"
                " allocator"
            )
        self._allocator = allocator
        self._memory: BoundedMemory = allocator
        self._on_removed = on_removed
        self._on_kept = on_kept
        self._clock = clock
        self._lock = threading.Lock()
        self._ledger = Ledger(policy, limits, clock)
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._num_failed_allocations = 0
        self._largest_bytes = 0
        self._incoming = Incoming()

    def allocate(self, num_bytes: int) -> MemoryObj | None:
        """Return memory for a payload, evicting chunks if necessary; the caller owns one reference.
        None if there is no room.
        """
        return self.allocate_tensor((num_bytes,), None, MemoryFormat.BINARY)

    def allocate_tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.KV_BLOB,
    ) -> MemoryObj | None:
        """Return memory for a tensor, evicting chunks if necessary; the caller owns one reference.
        None if there is no room.
        """
        gone: list[ChunkKey] = []
        memory_obj = self._allocate(shape, dtype, fmt, gone)
        self._report(gone)
        return memory_obj

    def receive(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        """Return memory for a payload that a tenant has announced; the caller owns one reference.

        The bytes may never arrive. Until they form a chunk, the memory counts against the tenant's
        quota, which only its own chunks make room for, and against its share of the tier.

        Returns:
            None if there is no room, or if the tenant may not hold more. In the second case no
                other tenant loses a chunk; in the first, chunks of about the payload's size are
                evicted, at most twice that (see `GAPS_SHARE`).
        """
        gone: list[ChunkKey] = []
        with self._lock:
            quota = self._ledger.quota(tenant)
            own = 0 if quota is None else self._incoming.recounted(tenant)
            if quota is not None and own + num_bytes > quota:
                self._ledger.refuse()
                self._num_failed_allocations += 1
                return None
            is_over = self._ledger.is_over_quota(tenant, own + num_bytes)
            victims = self._give_up(MAX_VICTIMS_PER_ALLOCATION, tenant if is_over else None)
            share = self._memory.capacity_bytes // RECEIVING_SHARE
            memory_obj = self._lend(num_bytes, tenant, share, victims, gone)
        self._report(gone)
        return memory_obj

    def receive_asked(self, num_bytes: int, most_bytes: int | None = None) -> MemoryObj | None:
        """Return memory for a payload that a slower tier has announced for one of its readers; the
        caller owns one reference.

        The bytes may never arrive, or decode to less than they state. Until they form a chunk, all
        that is being received and read together leaves one part in `KEPT_SHARE` of the memory
        alone.

        Args:
            most_bytes: Size of the largest payload that the reader can use; None: unknown. An
                unusually large one (`UNASKED_SHARE`) may then take free memory, up to one part in
                `RECEIVING_SHARE`, and evicts nothing.

        Returns:
            None if there is no room, or if the payload is larger than the reader can use.
        """
        gone: list[ChunkKey] = []
        victims: Iterator[ChunkKey]
        capacity = self._memory.capacity_bytes
        with self._lock:
            usual = most_bytes
            if usual is None:
                usual = max(self._largest_bytes, capacity // UNASKED_SHARE)
            if num_bytes <= usual + usual // ENVELOPE_SHARE + MIN_ENVELOPE_BYTES:
                victims, share = self._give_up(MAX_VICTIMS_PER_ALLOCATION), capacity
            else:
                victims = iter(())
                share = capacity // RECEIVING_SHARE if most_bytes is None else 0
            memory_obj = self._lend(num_bytes, None, share, victims, gone)
        self._report(gone)
        return memory_obj

    def get_many(self, keys: Sequence[ChunkKey], is_access: bool = True) -> list[Chunk | None]:
        """Return the chunks held, each with a reference that the caller owns, and None for the
        others.

        If `is_access`, counts as an access to all of them, in reverse order: the head of a chain of
        chunks then counts as the most recent.
        """
        with step("tier memory get"), self._lock:
            gone = self._expire(keys)
            found = [self._find(key) for key in keys]
            for chunk in reversed(found):
                if chunk is not None:
                    chunk.memory.ref_count_up()
                    if is_access:
                        self._ledger.access(chunk.key)
        self._report(gone)
        return found

    def results(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """Like `get_many`, but a missing chunk is a miss with its reason."""
        return [
            self.miss(key) if chunk is None else chunk
            for key, chunk in zip(keys, self.get_many(keys), strict=True)
        ]

    def put_many(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store chunks, taking a reference on the memory of each; memory outside any arena is
        copied into this one.

        A chunk that is already held is kept, unless it is lossy and the new one is not. Chunks are
        stored last first, so that the tail of a chain is evicted before its head.

        Returns:
            Whether each chunk is held now. False if its memory had to be copied and there was no
                room, or if it exceeds its tenant's quota.
        """
        held: set[ChunkKey] = set()
        with step("tier memory put"):
            for chunk in reversed(chunks):
                gone: list[ChunkKey] = []
                is_held = self._put(chunk, gone)
                self._report(gone)
                held.difference_update(gone)  # it may have made room at the cost of its own batch
                if is_held:
                    held.add(chunk.key)
        return [chunk.key in held for chunk in chunks]

    def replace(self, held: Chunk, better: Chunk) -> bool:
        """Serve `better` (borrowed, in this arena's memory) in the place of a chunk that the tier
        returned earlier: the same KV in another encoding. The name is held throughout.

        Returns:
            False if that chunk is no longer what the tier holds, or if its tenant's quota leaves no
                room for the difference; nothing has changed then.
        """
        gone: list[ChunkKey] = []
        with self._lock:
            current = self._chunks.get(held.key)
            is_replaced = (
                current is not None
                and current.memory is held.memory
                and self._makes_room_in_quota(held.key, better.memory.metadata.phy_size, gone)
            )
            if is_replaced:
                better.memory.ref_count_up()
                self._drop(held.key)
                self._hold(better.moved(better.memory, self.name))
        self._report(gone)
        return is_replaced

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks are held. Does not count as an access."""
        with self._lock:
            return [self._find(key) is not None for key in keys]

    def remove_many(self, keys: Sequence[ChunkKey]) -> int:
        """Drop chunks and return how many were held. Memory that a reader still references is freed
        when the reader releases it.
        """
        with self._lock:
            gone = [key for key in dict.fromkeys(keys) if key in self._chunks]
            for key in gone:
                self._drop(key)
        self._report(gone)
        return len(gone)

    def evict_bytes(self, num_bytes: int) -> int:
        """Evict chunks in the policy's order until at least `num_bytes` are free again; return the
        bytes freed.
        """
        gone: list[ChunkKey] = []
        with self._lock:
            before = self._ledger.used_bytes
            victims = self._give_up()
            while (
                before - self._ledger.used_bytes < num_bytes
                and (key := next(victims, None)) is not None
            ):
                gone.append(key)
            freed = before - self._ledger.used_bytes
        self._report(gone)
        return freed

    def miss(self, key: ChunkKey) -> Miss:
        """Return the miss to report for a chunk that is not held: evicted or expired if remembered,
        else never stored.
        """
        with self._lock:
            return self._ledger.miss(key)

    def held(self) -> list[tuple[ChunkKey, int]]:
        """Return name and size (whole record, bytes) of every chunk that would be served now."""
        with self._lock:
            keys = list(self._chunks)
        return self._sizes(keys)

    def hottest(self) -> list[tuple[ChunkKey, int]]:
        """Like `held`, but roughly in reverse order of eviction."""
        with self._lock:
            keys = self._ledger.coldest_first()
        return self._sizes(keys[::-1])

    def peek_many(self, keys: Sequence[ChunkKey]) -> list[HeldChunk | Miss]:
        """Return what is known about chunks. Does not count as an access."""
        with self._lock:
            found = [(key, self._find(key)) for key in keys]
            return [
                self._ledger.miss(key)
                if c is None
                else HeldChunk(c.num_bytes, c.stored_at, c.memory.get_ref_count() - 1, c.lossy)
                for key, c in found
            ]

    def clear_now(self, tenant: str | None = None) -> int:
        """Drop everything (of that tenant) and return the number of chunks."""
        return sum(self._clear_in_parts(tenant))

    @override
    def stats(self) -> dict[str, int]:
        """Return figures; `arena_used_bytes` also counts memory that is not a chunk of this tier,
        or no longer one.
        """
        with self._lock:
            return self._ledger.stats() | {
                "num_chunks": len(self._chunks),
                "used_bytes": self._ledger.used_bytes,
                "capacity_bytes": self._memory.capacity_bytes,
                "arena_used_bytes": self._memory.used_bytes,
                "failed_allocations": self._num_failed_allocations,
            }

    def check_integrity(self) -> None:
        """Check the accounting of tier, policy and arena.

        Raises:
            IntegrityError: The totals do not add up.
        """
        self._allocator.check_integrity()
        with self._lock:
            sizes = {key: chunk.memory.metadata.phy_size for key, chunk in self._chunks.items()}
            self._ledger.check_integrity(sizes)
            for key, chunk in self._chunks.items():
                if chunk.memory.get_ref_count() < 1:
                    raise IntegrityError(f"chunk {key.key.chunk_hash} is held without a reference")
            if self._ledger.used_bytes > self._memory.used_bytes:
                raise IntegrityError(
                    f"chunks hold {self._ledger.used_bytes} bytes, the arena has handed out"
                    f" {self._memory.used_bytes}"
                )

    async def open(self) -> None:
        """Do nothing: the arena already exists."""

    async def close(self) -> None:
        """Drop every chunk, so that the arena is empty once readers release theirs. Not reported as
        removals.
        """
        with self._lock:
            for key in list(self._chunks):
                self._drop(key)

    @override
    def contains_now(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.contains_many(keys)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.contains_many(keys)

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks; `allocate` is never called because the chunks are already in memory."""
        return self.results(keys)

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        return self.put_many(chunks)

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        return self.remove_many(keys)

    @override
    async def clear(self, tenant: str | None = None) -> int:
        """Drop everything. Chunks stored during the call may be dropped, too."""
        num_removed = 0
        for num_in_part in self._clear_in_parts(tenant):
            num_removed += num_in_part
            await asyncio.sleep(0)
        return num_removed

    async def evict(self, num_bytes: int) -> int:
        """Like `evict_bytes`, but in small steps."""
        freed = 0
        while freed < num_bytes:
            part = self.evict_bytes(min(num_bytes - freed, EVICTED_AT_ONCE_BYTES))
            if not part:
                break
            freed += part
            await asyncio.sleep(0)
        return freed

    def _sizes(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, int]]:
        found: list[tuple[ChunkKey, int]] = []
        for begin in range(0, len(keys), LISTED_AT_ONCE):
            part = keys[begin : begin + LISTED_AT_ONCE]
            with self._lock:
                chunks = [self._find(key) for key in part]
                found += [(chunk.key, chunk.num_bytes) for chunk in chunks if chunk is not None]
        return found

    def _clear_in_parts(self, tenant: str | None) -> Iterator[int]:
        with self._lock:
            keys = list(self._chunks)
        for begin in range(0, len(keys), REMOVED_AT_ONCE):
            part = keys[begin : begin + REMOVED_AT_ONCE]
            yield self.remove_many([key for key in part if tenant in (None, key.tenant)])

    def _put(self, chunk: Chunk, gone: list[ChunkKey]) -> bool:
        """Store a chunk, noting the keys of dropped ones in `gone`; return whether it is held."""
        memory_obj = chunk.memory
        if memory_obj.metadata.fmt is MemoryFormat.BINARY_BUFFER:
            copy = self._copy(chunk, gone)
            if copy is None:
                return self.contains_many([chunk.key])[0]
            memory_obj = copy
        else:
            memory_obj.ref_count_up()
        with self._lock:
            gone += self._expire([chunk.key])
            is_admitted = self._admits(chunk, memory_obj.metadata.phy_size, gone)
            if is_admitted:
                is_ours = memory_obj is chunk.memory and chunk.tier == self.name
                if chunk.key in self._chunks:  # it replaces a lossy one
                    self._drop(chunk.key)
                self._hold(chunk if is_ours else chunk.moved(memory_obj, self.name))
            is_held = self._find(chunk.key) is not None  # False if it has expired already
        if not is_admitted:
            memory_obj.ref_count_down()
        return is_held

    def _copy(self, chunk: Chunk, gone: list[ChunkKey]) -> MemoryObj | None:
        """Return the chunk's payload in this arena; None if the chunk is refused or there is no
        room. Notes the keys of dropped chunks in `gone`.
        """
        num_bytes = chunk.memory.get_size()
        with self._lock:
            is_admitted = self._admits(chunk, num_bytes, gone)
        memory_obj = None
        if is_admitted:
            memory_obj = self._allocate((num_bytes,), None, MemoryFormat.BINARY, gone)
        if memory_obj is not None:
            memory_obj.byte_array[:] = chunk.memory.byte_array
        return memory_obj

    def _allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat,
        gone: list[ChunkKey],
    ) -> MemoryObj | None:
        memory_obj = self._allocator.allocate(shape, dtype, fmt)
        if memory_obj is not None:
            return memory_obj
        if num_bytes(shape, "uint8" if dtype is None else dtype) > self._memory.capacity_bytes:
            return None
        with self._lock:
            for key in self._give_up(MAX_VICTIMS_PER_ALLOCATION):
                gone.append(key)
                memory_obj = self._allocator.allocate(shape, dtype, fmt)
                if memory_obj is not None:
                    break
            self._num_failed_allocations += memory_obj is None
        return memory_obj

    def _report(self, gone: Sequence[ChunkKey]) -> None:
        if self._on_removed is not None:
            for key in gone:
                self._on_removed(key)

    # The methods below are called with the lock held.

    def _find(self, key: ChunkKey) -> Chunk | None:
        """Return the chunk if it may be served, without counting an access."""
        chunk = self._chunks.get(key)
        if chunk is not None and self._ledger.has_ttl and not self._ledger.is_live(key):
            return None
        return chunk

    def _lend(
        self,
        num_bytes: int,
        tenant: str | None,
        share_bytes: int,
        victims: Iterator[ChunkKey],
        gone: list[ChunkKey],
    ) -> MemoryObj | None:
        """Return memory for an announced payload; None if no more may be borrowed, or there is no
        room.

        Args:
            tenant: The tenant that will store it; None: a reader asked for it.
            share_bytes: What the tenant, or all readers, may borrow at a time.
            victims: Evicts chunks to make room.
            gone: Receives the keys that were evicted.
        """
        memory_obj = None
        capacity = self._memory.capacity_bytes
        if self._incoming.has_room(num_bytes, tenant, share_bytes, capacity):
            memory_obj = self._allocator.allocate((num_bytes,), None, MemoryFormat.BINARY)
            gap = min(num_bytes, capacity // GAPS_SHARE)
            least_bytes = self._ledger.used_bytes - num_bytes - gap
            while memory_obj is None and self._ledger.used_bytes > least_bytes:
                key = next(victims, None)
                if key is None:
                    break
                gone.append(key)
                memory_obj = self._allocator.allocate((num_bytes,), None, MemoryFormat.BINARY)
        if memory_obj is None:
            self._num_failed_allocations += 1
        else:
            self._incoming.add(memory_obj, tenant)
        return memory_obj

    def _hold(self, kept: Chunk) -> None:
        """Begin to serve a chunk, whose reference passes to the tier."""
        memory_obj = kept.memory
        if kept.stored_at is None:
            kept.stored_at = self._clock()
        self._chunks[kept.key] = kept
        self._ledger.add(kept.key, memory_obj.metadata.phy_size, kept.stored_at)
        self._incoming.discard(memory_obj)
        self._largest_bytes = max(self._largest_bytes, memory_obj.get_size())
        if self._on_kept is not None:
            self._on_kept(kept)

    def _admits(self, chunk: Chunk, num_bytes: int, gone: list[ChunkKey]) -> bool:
        """Return whether a chunk is to be stored. Evicts chunks of its tenant if the quota requires
        it.

        Args:
            gone: Receives the keys that were evicted.
        """
        held = self._find(chunk.key)
        if held is not None and (chunk.lossy or not held.lossy):
            return False
        if chunk.key.lane.is_tail and not self._makes_room_among_tails(num_bytes, gone):
            return False
        return self._makes_room_in_quota(chunk.key, num_bytes, gone)

    def _makes_room_among_tails(self, num_bytes: int, gone: list[ChunkKey]) -> bool:
        """Return whether the tails' share of the memory has room for one more. Drops the oldest
        ones, noting their keys in `gone`, if that is required.
        """
        share = self._memory.capacity_bytes // TAILS_SHARE
        while num_bytes <= share and (oldest := self._ledger.oldest_tail) is not None:
            is_old = self._clock() - (self._chunks[oldest].stored_at or 0.0) > TAIL_S
            if not is_old and self._ledger.tail_bytes + num_bytes <= share:
                return True
            self._drop(oldest, MissReason.EXPIRED if is_old else MissReason.EVICTED)
            gone.append(oldest)
        return num_bytes <= share

    def _makes_room_in_quota(self, key: ChunkKey, num_bytes: int, gone: list[ChunkKey]) -> bool:
        """Return whether the quota lets `key` take that much memory, in place of what it takes now.
        Evicts other chunks of its tenant, noting their keys in `gone`, if that is required.
        """
        tenant = key.tenant
        quota = self._ledger.quota(tenant)
        if quota is None:
            return True
        held = self._find(key)
        more_bytes = num_bytes - (0 if held is None else held.memory.metadata.phy_size)
        if num_bytes <= quota and self._ledger.is_over_quota(tenant, more_bytes):
            for victim in self._give_up(tenant=tenant, spared=key):
                gone.append(victim)
                if not self._ledger.is_over_quota(tenant, more_bytes):
                    break
        if self._ledger.is_over_quota(tenant, more_bytes):
            self._ledger.refuse()
            return False
        return True

    def _expire(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Drop expired chunks: all of `keys`, and a few others. Those with readers, too: removal
        does not wait for readers.
        """
        if not self._ledger.has_ttl:
            return []
        past = self._ledger.past(MAX_EXPIRED_PER_CALL)
        past += [key for key in keys if key in self._chunks and not self._ledger.is_live(key)]
        gone = list(dict.fromkeys(past))
        for key in gone:
            self._drop(key, MissReason.EXPIRED)
        return gone

    def _give_up(
        self, limit: int | None = None, tenant: str | None = None, spared: ChunkKey | None = None
    ) -> Iterator[ChunkKey]:
        """Evict chunks one by one: first expired ones, then, in the policy's order, those without
        references.

        Args:
            limit: Number of chunks to examine; None: all.
            tenant: Evict only this tenant's chunks, for its quota; None: any tenant's.
            spared: Never evicted.

        Yields:
            The key just evicted.
        """
        for key in self._ledger.past(len(self._chunks) if limit is None else limit):
            self._drop(key, MissReason.EXPIRED)
            yield key
        for key in islice(self._ledger.victims(tenant), limit):
            if key == spared or self._chunks[key].memory.get_ref_count() > 1:
                continue
            self._drop(key, MissReason.EVICTED)
            yield key

    def _drop(self, key: ChunkKey, reason: MissReason | None = None) -> None:
        """Drop a held chunk; for the reason see `Ledger.remove`."""
        chunk = self._chunks.pop(key)
        self._ledger.remove(key, chunk.memory.metadata.phy_size, reason)
        chunk.memory.ref_count_down()
