"""The host-memory tier: chunks in one arena, shared by the engine's thread and the event loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lmcache_core.errors import IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryAllocatorInterface, MemoryFormat, MemoryObj
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import Allocate, Chunk, Miss, Result
from lmcache_core.storage.base import OnRemoved, StorageBackend
from lmcache_core.storage.eviction import EvictionPolicy, RecentEvictions

if TYPE_CHECKING:
    import torch

MAX_VICTIMS_PER_ALLOCATION = 1024
"""Chunks looked at before an allocation gives up; the next one goes on where it stopped."""


@runtime_checkable
class BoundedMemory(Protocol):
    """Ability: an allocator that can be full."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be handed out."""

    @property
    def used_bytes(self) -> int:
        """Bytes handed out, alignment included."""


class LocalCPUBackend(StorageBackend):
    """Chunks in host memory. The sync methods are thread-safe and never wait for I/O; the async ones are the same calls.

    The tier holds one reference on every chunk it keeps. A chunk on which anybody else holds one (a reader, a write to a
    slower tier, a client's pin) is not evicted.

    Args:
        allocator: The arena, which must be a `BoundedMemory`; others may allocate from it too.
        policy: Which chunks go first; belongs to this tier.
        on_removed: Called with every key that the tier gives up, in the thread that caused it, without a lock held.
    """

    name = "Hot"

    def __init__(self, allocator: MemoryAllocatorInterface, policy: EvictionPolicy, on_removed: OnRemoved | None = None) -> None:
        if not isinstance(allocator, BoundedMemory):
            raise TypeError(f"{type(allocator).__name__} has no capacity; the host-memory tier needs a bounded allocator")
        self._allocator = allocator
        self._memory: BoundedMemory = allocator
        self._policy = policy
        self._on_removed = on_removed
        self._lock = threading.Lock()
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._used_bytes = 0
        self._recent = RecentEvictions()
        self._num_evicted = 0
        self._num_failed_allocations = 0

    def allocate(self, num_bytes: int) -> MemoryObj | None:
        """Memory for a payload, by eviction if need be; one reference owned by the caller. None when there is no room."""
        return self.allocate_tensor((num_bytes,), None, MemoryFormat.BINARY)

    def allocate_tensor(
        self, shape: Sequence[int], dtype: torch.dtype | str | None, fmt: MemoryFormat = MemoryFormat.KV_BLOB
    ) -> MemoryObj | None:
        """Memory for a tensor, by eviction if need be; one reference owned by the caller. None when there is no room."""
        memory_obj = self._allocator.allocate(shape, dtype, fmt)
        if memory_obj is not None:
            return memory_obj
        if num_bytes(shape, "uint8" if dtype is None else dtype) > self._memory.capacity_bytes:
            return None
        gone: list[ChunkKey] = []
        with self._lock:
            for key in islice(self._policy.victims(), MAX_VICTIMS_PER_ALLOCATION):
                if self._chunks[key].memory.get_ref_count() > 1:
                    continue
                self._evict(key)
                gone.append(key)
                memory_obj = self._allocator.allocate(shape, dtype, fmt)
                if memory_obj is not None:
                    break
            self._num_failed_allocations += memory_obj is None
        self._report(gone)
        return memory_obj

    def get_many(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        """The chunks that are held, None for the others; each with a reference of its own, owned by the caller."""
        found: list[Chunk | None] = []
        with self._lock:
            for key in keys:
                chunk = self._chunks.get(key)
                if chunk is not None:
                    chunk.memory.ref_count_up()
                    self._policy.on_access(key)
                found.append(chunk)
        return found

    def put_many(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Keep chunks, taking a reference on the memory of each; memory outside any arena is copied into this one.

        A chunk that is held already stays as it is, unless it is lossy and the new one is not.

        Returns:
            For each whether it is held now; False only when memory had to be copied and there was no room.
        """
        return [self._put(chunk) for chunk in chunks]

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which chunks are held. Does not count as an access."""
        with self._lock:
            return [key in self._chunks for key in keys]

    def remove_many(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; how many were held. Memory that a reader still references is freed when it lets go."""
        with self._lock:
            gone = [key for key in dict.fromkeys(keys) if key in self._chunks]
            for key in gone:
                self._drop(key)
        self._report(gone)
        return len(gone)

    def evict_bytes(self, num_bytes: int) -> int:
        """Give up chunks in the policy's order until at least that many bytes are free again; the bytes freed."""
        gone: list[ChunkKey] = []
        with self._lock:
            goal = self._used_bytes - num_bytes
            before = self._used_bytes
            for key in self._policy.victims():
                if self._used_bytes <= goal:
                    break
                if self._chunks[key].memory.get_ref_count() == 1:
                    self._evict(key)
                    gone.append(key)
            freed = before - self._used_bytes
        self._report(gone)
        return freed

    def miss(self, key: ChunkKey) -> Miss:
        """The miss to report for a chunk that is not held: evicted, as far as remembered, or never stored."""
        with self._lock:
            return self._recent.miss(key)

    def keys(self) -> list[ChunkKey]:
        """Names of all chunks held now."""
        with self._lock:
            return list(self._chunks)

    def held(self) -> list[tuple[ChunkKey, int]]:
        """Name and size (whole record, bytes) of every chunk held now."""
        with self._lock:
            return [(key, chunk.num_bytes) for key, chunk in self._chunks.items()]

    def clear_now(self, tenant: str | None = None) -> int:
        """Forget everything (of that tenant); the number of chunks."""
        return self.remove_many([key for key in self.keys() if tenant is None or key.tenant == tenant])

    def stats(self) -> dict[str, int]:
        """See `StorageBackend.stats`; `arena_used_bytes` also counts memory that is not (or no longer) a chunk of this tier."""
        with self._lock:
            return {
                "num_chunks": len(self._chunks),
                "used_bytes": self._used_bytes,
                "capacity_bytes": self._memory.capacity_bytes,
                "arena_used_bytes": self._memory.used_bytes,
                "evicted_chunks": self._num_evicted,
                "failed_allocations": self._num_failed_allocations,
            }

    def check_integrity(self) -> None:
        """Compare the books of tier, policy and arena.

        Raises:
            IntegrityError: They do not balance.
        """
        self._allocator.check_integrity()
        with self._lock:
            used = sum(chunk.memory.metadata.phy_size for chunk in self._chunks.values())
            if used != self._used_bytes or used > self._memory.used_bytes:
                raise IntegrityError(f"chunks hold {used} bytes, books say {self._used_bytes}, arena {self._memory.used_bytes}")
            if len(self._policy) != len(self._chunks):
                raise IntegrityError(f"{len(self._chunks)} chunks, but the policy knows {len(self._policy)}")
            for key, chunk in self._chunks.items():
                if chunk.memory.get_ref_count() < 1:
                    raise IntegrityError(f"chunk {key.key.chunk_hash} is held without a reference")

    async def open(self) -> None:
        """Nothing to do: the arena exists."""

    async def close(self) -> None:
        """Give up every chunk, so that the arena is empty once readers let go. Not reported as removals."""
        with self._lock:
            for key in list(self._chunks):
                self._drop(key)

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        return self.contains_many(keys)

    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None) -> list[Result]:
        """See `StorageBackend.batched_get`; `allocate` is not called, since the chunks are in memory."""
        return [self.miss(key) if chunk is None else chunk for key, chunk in zip(keys, self.get_many(keys), strict=True)]

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        return self.put_many(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        return self.remove_many(keys)

    async def clear(self, tenant: str | None = None) -> int:
        """See `StorageBackend.clear`."""
        return self.clear_now(tenant)

    def _put(self, chunk: Chunk) -> bool:
        with self._lock:
            if not self._wants(chunk):
                return True
        if chunk.memory.get_memory_format() is MemoryFormat.BINARY_BUFFER:
            memory_obj = self.allocate(chunk.memory.get_size())
            if memory_obj is None:
                return False
            memory_obj.byte_array[:] = chunk.memory.byte_array
        else:
            memory_obj = chunk.memory
            memory_obj.ref_count_up()
        with self._lock:
            is_wanted = self._wants(chunk)
            if is_wanted:
                if chunk.key in self._chunks:
                    self._drop(chunk.key)
                is_ours = memory_obj is chunk.memory and chunk.tier == self.name
                self._insert(chunk if is_ours else chunk.moved(memory_obj, self.name))
        if not is_wanted:
            memory_obj.ref_count_down()
        return True

    def _wants(self, chunk: Chunk) -> bool:
        held = self._chunks.get(chunk.key)
        return held is None or (held.lossy and not chunk.lossy)

    def _insert(self, chunk: Chunk) -> None:
        taken = chunk.memory.metadata.phy_size
        self._chunks[chunk.key] = chunk
        self._used_bytes += taken
        self._policy.on_insert(chunk.key, taken)
        self._recent.discard(chunk.key)

    def _drop(self, key: ChunkKey) -> None:
        chunk = self._chunks.pop(key)
        self._used_bytes -= chunk.memory.metadata.phy_size
        self._policy.on_remove(key)
        chunk.memory.ref_count_down()

    def _evict(self, key: ChunkKey) -> None:
        self._drop(key)
        self._num_evicted += 1
        self._recent.add(key)

    def _report(self, gone: Sequence[ChunkKey]) -> None:
        if self._on_removed is not None:
            for key in gone:
                self._on_removed(key)
