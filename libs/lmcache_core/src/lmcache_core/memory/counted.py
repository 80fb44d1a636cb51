"""Reference counting shared by all allocators, wherever their memory is. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from lmcache_core._typing import override
from lmcache_core.errors import IntegrityError
from lmcache_core.memory.base import (
    FreeBlock,
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
)
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.memory.views import tensor_over

if TYPE_CHECKING:
    import torch


OnFreed = Callable[[int], None]


class Room(Protocol):
    """Tracks which space is taken and which is free. Not thread-safe: the allocator locks.

    Attributes:
        capacity: Total bytes.
    """

    capacity: int
    used_bytes: int

    @property
    def num_used_blocks(self) -> int:
        """Number of allocated blocks."""

    def allocate(self, size: int) -> FreeBlock | None:
        """Take a block of at least `size` bytes; None if there is no room."""

    def free(self, start: int) -> None:
        """Free the block that begins at `start`."""

    def check_integrity(self) -> None:
        """Raise IntegrityError if the accounting does not add up."""


class CountedMemoryObj(MemoryObj):
    """Host memory whose references its allocator counts.

    Args:
        view: Its bytes, as many as the metadata state.
        allocator: Frees it; without one the memory belongs to the garbage collector and the count
            is always 1.
    """

    __slots__ = ("_allocator", "_view")

    def __init__(
        self,
        view: memoryview,
        metadata: MemoryObjMetadata,
        allocator: CountingAllocator | None,
    ) -> None:
        self.metadata = metadata
        self._view = view
        self._allocator = allocator

    @override
    def ref_count_up(self) -> None:
        if self._allocator is not None:
            self._allocator.change_ref_count(self.metadata, +1)

    @override
    def ref_count_down(self) -> None:
        if self._allocator is not None:
            self._allocator.change_ref_count(self.metadata, -1)

    @override
    def get_ref_count(self) -> int:
        return 1 if self._allocator is None else self.metadata.ref_count

    @property
    @override
    def byte_array(self) -> memoryview:
        if self.metadata.ref_count <= 0:
            self._require_held()
        return self._view

    @override
    def get_size(self) -> int:
        return len(self._view)

    @property
    @override
    def tensor(self) -> torch.Tensor:
        return tensor_over(self.byte_array, self.metadata.shape, self.metadata.dtype)

    def _require_held(self) -> None:
        """Refuse access to memory that may already belong to another object."""
        if self._allocator is not None and self.metadata.ref_count <= 0:
            raise IntegrityError(
                f"memory at {self.metadata.address} is used after its last reference was released"
            )


class CountingAllocator(MemoryAllocatorInterface):
    """Tracks allocated objects, and frees the space of each with its last reference. Thread-safe.

    Args:
        room: The space to allocate from; must not be shared with another allocator.
        on_freed: Called with the address of everything that is freed, under this allocator's lock:
            it must not call back.
    """

    def __init__(self, room: Room, on_freed: OnFreed | None = None) -> None:
        self._room = room
        self._on_freed = on_freed
        self._lock = threading.Lock()
        self._handed_out: dict[int, MemoryObjMetadata] = {}

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be allocated."""
        return self._room.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes allocated, alignment included."""
        return self._room.used_bytes

    def owns(self, memory: MemoryObj) -> bool:
        """Return whether this memory is a part of this allocator's."""
        return isinstance(memory, CountedMemoryObj) and memory._allocator is self

    def change_ref_count(self, meta: MemoryObjMetadata, by: int) -> None:
        """Add `by` to an object's references and free it at zero.

        Raises:
            IntegrityError: The object is already free, or belongs to another allocator.
        """
        with self._lock:
            if self._handed_out.get(meta.address) is not meta:
                self._require_ours(meta)
            meta.ref_count += by
            if meta.ref_count <= 0:
                self._give_back(meta)

    @override
    def free(self, memory_obj: MemoryObj) -> None:
        """Free the memory regardless of references.

        Raises:
            IntegrityError: The object is already free (its address may have been reused), or
                belongs to another allocator.
        """
        meta = memory_obj.metadata
        with self._lock:
            self._require_ours(meta)
            self._give_back(meta)

    @override
    def get_ref_count(self, memory_obj: MemoryObj) -> int:
        return memory_obj.get_ref_count()

    @override
    def check_integrity(self) -> None:
        with self._lock:
            self._room.check_integrity()
            held_bytes = sum(meta.phy_size for meta in self._handed_out.values())
            if (
                held_bytes != self._room.used_bytes
                or len(self._handed_out) != self._room.num_used_blocks
            ):
                raise IntegrityError(
                    f"objects hold {held_bytes} bytes, {self._room.used_bytes} are taken"
                )
            if any(meta.ref_count < 1 for meta in self._handed_out.values()):
                raise IntegrityError("memory without a reference is still allocated")

    def _take(
        self, shape: Sequence[int], dtype: torch.dtype | str | None, fmt: MemoryFormat
    ) -> MemoryObjMetadata | None:
        """Return space for that tensor, with one reference; None if there is none."""
        if min(shape, default=0) < 0:
            raise ValueError(f"shape={tuple(shape)}: a dimension is negative")
        size = num_bytes(shape, dtype or "uint8")
        with self._lock:
            block = self._room.allocate(size)
            if block is None:
                return None
            meta = MemoryObjMetadata(shape, dtype, block.start, block.size, 1, fmt)
            self._handed_out[block.start] = meta
        return meta

    def _require_ours(self, meta: MemoryObjMetadata) -> None:
        if self._handed_out.get(meta.address) is not meta:
            why = "belongs to another allocator" if meta.ref_count > 0 else "is already free"
            raise IntegrityError(
                f"memory at {meta.address} {why}: its references cannot be changed here"
            )

    def _give_back(self, meta: MemoryObjMetadata) -> None:
        meta.ref_count = 0
        del self._handed_out[meta.address]
        self._room.free(meta.address)
        if self._on_freed is not None:
            self._on_freed(meta.address)
