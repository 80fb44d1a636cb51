"""The host-memory tier: chunks in one arena, shared by the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from lmcache_core._typing import override
from lmcache_core.errors import IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryAllocatorInterface, MemoryFormat, MemoryObj
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import OnRemoved, StorageBackend
from lmcache_core.storage.eviction import Clock, EvictionPolicy, Ledger, TierLimits
from lmcache_core.telemetry.request_context import step

if TYPE_CHECKING:
    import torch

MAX_VICTIMS_PER_ALLOCATION = 1024
"""Chunks looked at before an allocation gives up; the next one goes on where it stopped."""
RECEIVING_SHARE = 2
"""What is on its way in for one tenant may hold one part in this many of the memory."""
KEPT_SHARE = 4
"""One part in this many is not lent to what is on its way in, of any tenant."""
GAPS_SHARE = 8
"""For what a tenant announces, chunks of its size are given up, and as much again but no more than
one part in this many of the memory, since what they leave free may lie in several places.
"""
LISTED_AT_ONCE = 1024
"""Chunks that a listing looks at before it lets go of the lock."""
REMOVED_AT_ONCE = 1024
"""Chunks that a removal takes before others have their turn."""
EVICTED_AT_ONCE_BYTES = 64 << 20
MAX_EXPIRED_PER_CALL = 16
"""Chunks whose time is over that a call forgets on its way; more than one, so that they do not
pile up.
"""


@runtime_checkable
class BoundedMemory(Protocol):
    """Ability: an allocator that can be full."""

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes that can be handed out."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes handed out, alignment included."""


OnKept = Callable[[Chunk], None]


class HeldChunk(NamedTuple):
    """Facts about a chunk that the tier holds.

    Attributes:
        num_bytes: Of the whole record.
        stored_at: When it was stored, seconds since the epoch; None: not known.
        num_holders: References on its memory other than the tier's own: readers, pins, writes to
            slower tiers.
        lossy: Whether its encoding has lost something.
    """

    num_bytes: int
    stored_at: float | None
    num_holders: int
    lossy: bool


class LocalCPUBackend(StorageBackend):
    """Chunks in host memory. The sync methods are thread-safe and never wait for I/O; the async
    ones are the same calls.

    The tier holds one reference on every chunk it keeps. A chunk on which anybody else holds one (a
    reader, a write to a slower tier, a client's pin) is not evicted. One whose time is over is a
    miss, and goes when the next call comes by, pinned or not.

    Args:
        allocator: The arena, which must be a `BoundedMemory`; others may allocate from it too.
        policy: Which chunks go first; belongs to this tier.
        on_removed: Called with every key that the tier gives up, in the thread that caused it,
            without a lock held.
        limits: What it does not keep although it has room.
        clock: Tells the age of chunks.
        on_kept: Called with every chunk that the tier keeps, in this arena's memory, under the
            tier's lock: it must not call back.
    """

    name = "Hot"

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
        self._incoming: list[tuple[MemoryObj, str]] = []

    def allocate(self, num_bytes: int) -> MemoryObj | None:
        """Return memory for a payload, by eviction if need be; one reference owned by the caller.
        None when there is no room.
        """
        return self.allocate_tensor((num_bytes,), None, MemoryFormat.BINARY)

    def allocate_tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.KV_BLOB,
    ) -> MemoryObj | None:
        """Return memory for a tensor, by eviction if need be; one reference owned by the caller.
        None when there is no room.
        """
        memory_obj = self._allocator.allocate(shape, dtype, fmt)
        if memory_obj is not None:
            return memory_obj
        if num_bytes(shape, "uint8" if dtype is None else dtype) > self._memory.capacity_bytes:
            return None
        gone: list[ChunkKey] = []
        with self._lock:
            for key in self._give_up(MAX_VICTIMS_PER_ALLOCATION):
                gone.append(key)
                memory_obj = self._allocator.allocate(shape, dtype, fmt)
                if memory_obj is not None:
                    break
            self._num_failed_allocations += memory_obj is None
        self._report(gone)
        return memory_obj

    def receive(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        """Return memory for a payload that a tenant has announced; one reference owned by the
        caller.

        The bytes may never come. Until they are a chunk, the memory counts against the tenant:
        against its quota, for which it gives up its own chunks and no others, and against a part of
        the tier.

        Args:
            num_bytes: As announced.
            tenant: The tenant that will store it.

        Returns:
            None when there is no room, or no more for that tenant. In the second case others have
            given up nothing; in the first, chunks of about its size, at most twice that (see
            `GAPS_SHARE`).
        """
        gone: list[ChunkKey] = []
        with self._lock:
            self._incoming = [entry for entry in self._incoming if entry[0].get_ref_count() > 0]
            memory_obj = self._lend(num_bytes, tenant, gone)
            if memory_obj is None:
                self._num_failed_allocations += 1
            else:
                self._incoming.append((memory_obj, tenant))
        self._report(gone)
        return memory_obj

    def get_many(self, keys: Sequence[ChunkKey], is_access: bool = True) -> list[Chunk | None]:
        """Return the chunks that are held, None for the others; each with a reference of its own,
        owned by the caller.

        Counts as an access to all of them (if it `is_access`), the last one first: of a chain of
        chunks the head is then the most recent.
        """
        with step("tier Hot get"), self._lock:
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
        """Like `get_many`, with the reason why a chunk is missing."""
        return [
            self.miss(key) if chunk is None else chunk
            for key, chunk in zip(keys, self.get_many(keys), strict=True)
        ]

    def put_many(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Keep chunks, taking a reference on the memory of each; memory outside any arena is copied
        into this one.

        A chunk that is held already stays as it is, unless it is lossy and the new one is not. The
        last one is kept first: of a chain of chunks the tail then goes before the head.

        Returns:
            For each whether it is held now; False when memory had to be copied and there was no
            room, or by its tenant's quota.
        """
        with step("tier Hot put"):
            for chunk in reversed(chunks):
                self._put(chunk)
        return self.contains_many([chunk.key for chunk in chunks])

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks are held. Does not count as an access."""
        with self._lock:
            return [self._find(key) is not None for key in keys]

    def remove_many(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; how many were held. Memory that a reader still references is freed when
        it lets go.
        """
        with self._lock:
            gone = [key for key in dict.fromkeys(keys) if key in self._chunks]
            for key in gone:
                self._drop(key)
        self._report(gone)
        return len(gone)

    def evict_bytes(self, num_bytes: int) -> int:
        """Give up chunks in the policy's order until at least that many bytes are free again;
        the bytes freed.
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
        """Return the miss to report for a chunk that is not held: evicted or expired, as far as
        remembered, or never stored.
        """
        with self._lock:
            return self._ledger.miss(key)

    def keys(self) -> list[ChunkKey]:
        """Return the names of all chunks that would be served now."""
        return [key for key, _ in self.held()]

    def held(self) -> list[tuple[ChunkKey, int]]:
        """Return name and size (whole record, bytes) of every chunk that would be served now."""
        with self._lock:
            keys = list(self._chunks)
        return self._sizes(keys)

    def hottest(self) -> list[tuple[ChunkKey, int]]:
        """Like `held`, roughly what would be evicted last first."""
        with self._lock:
            keys = self._ledger.coldest_first()
        return self._sizes(keys[::-1])

    def peek_many(self, keys: Sequence[ChunkKey]) -> list[HeldChunk | Miss]:
        """Return what is known of chunks. Does not count as an access."""
        with self._lock:
            found = [(key, self._find(key)) for key in keys]
            return [
                self._ledger.miss(key)
                if c is None
                else HeldChunk(c.num_bytes, c.stored_at, c.memory.get_ref_count() - 1, c.lossy)
                for key, c in found
            ]

    def clear_now(self, tenant: str | None = None) -> int:
        """Forget everything (of that tenant); the number of chunks."""
        return sum(self._clear_in_parts(tenant))

    @override
    def stats(self) -> dict[str, int]:
        """Return figures; `arena_used_bytes` also counts memory that is not (or no
        longer) a chunk of this tier.
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
        """Compare the books of tier, policy and arena.

        Raises:
            IntegrityError: They do not balance.
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
        """Do nothing: the arena exists."""

    async def close(self) -> None:
        """Give up every chunk, so that the arena is empty once readers let go. Not reported as
        removals.
        """
        with self._lock:
            for key in list(self._chunks):
                self._drop(key)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self.contains_many(keys)

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks; `allocate` is not called, since the chunks are in
        memory.
        """
        return self.results(keys)

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        return self.put_many(chunks)

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        return self.remove_many(keys)

    @override
    async def clear(self, tenant: str | None = None) -> int:
        """Forget everything. What is stored meanwhile may go, too."""
        num_removed = 0
        for num_in_part in self._clear_in_parts(tenant):
            num_removed += num_in_part
            await asyncio.sleep(0)
        return num_removed

    async def evict(self, num_bytes: int) -> int:
        """Do as `evict_bytes`, a little at a time."""
        freed = 0
        while freed < num_bytes:
            part = self.evict_bytes(min(num_bytes - freed, EVICTED_AT_ONCE_BYTES))
            if not part:
                break
            freed += part
            await asyncio.sleep(0)
        return freed

    def _sizes(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, int]]:
        """Return name and size of those chunks that would be served now."""
        found: list[tuple[ChunkKey, int]] = []
        for begin in range(0, len(keys), LISTED_AT_ONCE):
            part = keys[begin : begin + LISTED_AT_ONCE]
            with self._lock:
                chunks = [self._find(key) for key in part]
                found += [(chunk.key, chunk.num_bytes) for chunk in chunks if chunk is not None]
        return found

    def _clear_in_parts(self, tenant: str | None) -> Iterator[int]:
        """Forget everything (of that tenant), and yield the number of chunks after each part."""
        with self._lock:
            keys = list(self._chunks)
        for begin in range(0, len(keys), REMOVED_AT_ONCE):
            part = keys[begin : begin + REMOVED_AT_ONCE]
            yield self.remove_many([key for key in part if tenant in (None, key.tenant)])

    def _put(self, chunk: Chunk) -> None:
        memory_obj = chunk.memory
        if memory_obj.metadata.fmt is MemoryFormat.BINARY_BUFFER:
            copy = self._copy(chunk)
            if copy is None:
                return
            memory_obj = copy
        else:
            memory_obj.ref_count_up()
        with self._lock:
            gone = self._expire([chunk.key]) if self._ledger.has_ttl else []
            is_admitted = self._admits(chunk, memory_obj.metadata.phy_size, gone)
            if is_admitted:
                is_ours = memory_obj is chunk.memory and chunk.tier == self.name
                kept = chunk if is_ours else chunk.moved(memory_obj, self.name)
                if kept.stored_at is None:
                    kept.stored_at = self._clock()
                if kept.key in self._chunks:  # it takes the place of a lossy one
                    self._drop(kept.key)
                self._chunks[kept.key] = kept
                self._ledger.add(kept.key, memory_obj.metadata.phy_size, kept.stored_at)
                if self._incoming:
                    self._incoming = [held for held in self._incoming if held[0] is not memory_obj]
                if self._on_kept is not None:
                    self._on_kept(kept)
        if not is_admitted:
            memory_obj.ref_count_down()
        if gone:
            self._report(gone)

    def _copy(self, chunk: Chunk) -> MemoryObj | None:
        """Return the chunk's payload in this arena; None when it is not to be kept, or there is no
        room.
        """
        gone: list[ChunkKey] = []
        with self._lock:
            is_admitted = self._admits(chunk, chunk.memory.get_size(), gone)
        self._report(gone)
        memory_obj = self.allocate(chunk.memory.get_size()) if is_admitted else None
        if memory_obj is not None:
            memory_obj.byte_array[:] = chunk.memory.byte_array
        return memory_obj

    def _report(self, gone: Sequence[ChunkKey]) -> None:
        if self._on_removed is not None:
            for key in gone:
                self._on_removed(key)

    # What follows is called under the lock.

    def _find(self, key: ChunkKey) -> Chunk | None:
        """Return the chunk if it may be served; not an access."""
        chunk = self._chunks.get(key)
        if chunk is not None and self._ledger.has_ttl and not self._ledger.is_live(key):
            return None
        return chunk

    def _lend(self, num_bytes: int, tenant: str, gone: list[ChunkKey]) -> MemoryObj | None:
        """Return memory for what a tenant has announced; None if it may not be lent so much more,
        or there is no room.

        Args:
            num_bytes: As announced.
            tenant: The tenant that asks.
            gone: Extended by the keys that were given up.
        """
        own = sum(memory.metadata.phy_size for memory, whose in self._incoming if whose == tenant)
        of_all = sum(memory.metadata.phy_size for memory, _ in self._incoming)
        capacity = self._memory.capacity_bytes
        quota = self._ledger.quota(tenant)
        if quota is not None and own + num_bytes > quota:
            self._ledger.refuse()
            return None
        if (
            own + num_bytes > capacity // RECEIVING_SHARE
            or of_all + num_bytes > capacity - capacity // KEPT_SHARE
        ):
            return None
        memory_obj = self._allocator.allocate((num_bytes,), None, MemoryFormat.BINARY)
        if memory_obj is not None:
            return memory_obj
        is_over = self._ledger.is_over_quota(tenant, own + num_bytes)
        least_bytes = self._ledger.used_bytes - num_bytes - min(num_bytes, capacity // GAPS_SHARE)
        for key in self._give_up(MAX_VICTIMS_PER_ALLOCATION, tenant if is_over else None):
            gone.append(key)
            memory_obj = self._allocator.allocate((num_bytes,), None, MemoryFormat.BINARY)
            if memory_obj is not None or self._ledger.used_bytes <= least_bytes:
                break
        return memory_obj

    def _admits(self, chunk: Chunk, num_bytes: int, gone: list[ChunkKey]) -> bool:
        """Return whether a chunk is to be kept. Its tenant's own chunks are given up for it as far
        as the quota demands.

        Args:
            chunk: The chunk.
            num_bytes: What it will take.
            gone: Extended by the keys that were given up.
        """
        held = self._find(chunk.key)
        if held is not None and (chunk.lossy or not held.lossy):
            return False
        tenant = chunk.key.tenant
        quota = self._ledger.quota(tenant)
        if quota is None:
            return True
        more_bytes = num_bytes - (0 if held is None else held.memory.metadata.phy_size)
        if num_bytes <= quota and self._ledger.is_over_quota(tenant, more_bytes):
            for key in self._give_up(tenant=tenant, spared=chunk.key):
                gone.append(key)
                if not self._ledger.is_over_quota(tenant, more_bytes):
                    break
        if self._ledger.is_over_quota(tenant, more_bytes):
            self._ledger.refuse()
            return False
        return True

    def _expire(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Forget chunks whose time is over: all of `keys`, and a few others. Those with readers
        too: nothing waits for them.
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
            self._drop(key, MissReason.EXPIRED)
            yield key
        for key in islice(self._ledger.victims(tenant), limit):
            if key == spared or self._chunks[key].memory.get_ref_count() > 1:
                continue
            self._drop(key, MissReason.EVICTED)
            yield key

    def _drop(self, key: ChunkKey, reason: MissReason | None = None) -> None:
        """Forget a held chunk; for the reason see `Ledger.remove`."""
        chunk = self._chunks.pop(key)
        self._ledger.remove(key, chunk.memory.metadata.phy_size, reason)
        chunk.memory.ref_count_down()
