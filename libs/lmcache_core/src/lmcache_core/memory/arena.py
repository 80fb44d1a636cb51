"""Allocation in one byte arena: a private mapping, a shared-memory file, or a tensor's storage. No torch until `.tensor`."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import IntegrityError
from lmcache_core.memory.base import DescribedMemoryObj, MemoryAllocatorInterface, MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.memory.free_list import FreeList
from lmcache_core.memory.views import tensor_over

if TYPE_CHECKING:
    import torch


class ArenaMemoryObj(DescribedMemoryObj):
    """A piece of an arena; made by `ArenaAllocator`."""

    def __init__(self, allocator: ArenaAllocator, metadata: MemoryObjMetadata, view: memoryview) -> None:
        super().__init__(metadata)
        self._allocator = allocator
        self._view = view

    def ref_count_up(self) -> None:
        """See `MemoryObj.ref_count_up`."""
        self._allocator.change_ref_count(self, +1)

    def ref_count_down(self) -> None:
        """See `MemoryObj.ref_count_down`."""
        self._allocator.change_ref_count(self, -1)

    @property
    def byte_array(self) -> memoryview:
        """See `MemoryObj.byte_array`."""
        return self._view

    @property
    def tensor(self) -> torch.Tensor:
        """See `MemoryObj.tensor`."""
        return tensor_over(self._view, self._metadata.shape, self._metadata.dtype)


class ArenaAllocator(MemoryAllocatorInterface):
    """Cuts one writable buffer into memory objects. Thread-safe.

    Args:
        buffer: Writable, contiguous bytes; stays referenced while the allocator lives.
    """

    def __init__(self, buffer: memoryview) -> None:
        if buffer.readonly:
            raise ValueError("an arena needs a writable buffer")
        self._buffer = buffer.cast("B")
        self._list = FreeList(len(self._buffer))
        self._lock = threading.Lock()

    @classmethod
    def anonymous(cls, size: int) -> ArenaAllocator:
        """An arena of `size` bytes of private memory, touched so that no first use is slow."""
        mapping = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        return cls(memoryview(mapping)[: max(size, mmap.PAGESIZE)])

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be handed out."""
        return self._list.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes handed out, alignment included."""
        return self._list.used_bytes

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype | str | None, fmt: MemoryFormat = MemoryFormat.KV_BLOB
    ) -> ArenaMemoryObj | None:
        """See `MemoryAllocatorInterface.allocate`."""
        size = num_bytes(shape, dtype) if dtype is not None else math.prod(shape)
        with self._lock:
            block = self._list.allocate(size)
        if block is None:
            return None
        meta = MemoryObjMetadata(tuple(shape), dtype, block.start, block.size, 1, fmt)
        return ArenaMemoryObj(self, meta, self._buffer[block.start : block.start + size])

    def change_ref_count(self, memory_obj: MemoryObj, by: int) -> None:
        """Add `by` to the object's references and free it at zero.

        Raises:
            IntegrityError: The object is already free.
        """
        meta = memory_obj.metadata
        with self._lock:
            if meta.ref_count <= 0:
                raise IntegrityError(f"memory at {meta.address} is used after its last reference was given back")
            meta.ref_count += by
            if meta.ref_count == 0:
                self._list.free(meta.address)

    def free(self, memory_obj: MemoryObj) -> None:
        """See `MemoryAllocatorInterface.free`.

        Raises:
            IntegrityError: The object is already free; its address may belong to another one by now.
        """
        meta = memory_obj.metadata
        with self._lock:
            if meta.ref_count <= 0:
                raise IntegrityError(f"memory at {meta.address} is freed twice")
            meta.ref_count = 0
            self._list.free(meta.address)

    def get_ref_count(self, memory_obj: MemoryObj) -> int:
        """See `MemoryAllocatorInterface.get_ref_count`."""
        return memory_obj.metadata.ref_count

    def check_integrity(self) -> None:
        """See `MemoryAllocatorInterface.check_integrity`."""
        with self._lock:
            self._list.check_integrity()
