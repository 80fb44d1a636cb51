"""Pinned memory for what engines copy, byte buffers for data that only passes through."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_core._typing import override
from lmcache_core.errors import IntegrityError
from lmcache_core.memory.base import MemoryAllocatorInterface, MemoryFormat, MemoryObj
from lmcache_core.memory.buffer import BufferAllocator, BytesBufferMemoryObj
from lmcache_core.memory.tensor import PinMemoryAllocator, TensorMemoryObj


class MixedMemoryAllocator(MemoryAllocatorInterface):
    """A pinned arena, and byte buffers for the format `BINARY_BUFFER`. Thread-safe.

    Every other format, including `BINARY`, is in the arena: encoded chunks that a tier keeps are
    counted with the rest, and only bytes in transit (a reply, a value to be sent) are buffers.

    Args:
        size: Bytes of the arena.
        buffer_capacity_bytes: Bytes of buffers that may be allocated at a time; by default as many
            as the arena has.

    Raises:
        ValueError: A size is negative.
        CapacityError: The machine does not have that much.
    """

    def __init__(self, size: int, buffer_capacity_bytes: int | None = None) -> None:
        self._arena = PinMemoryAllocator(size)
        self._buffers = BufferAllocator(
            capacity_bytes=size if buffer_capacity_bytes is None else buffer_capacity_bytes
        )

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the arena can allocate."""
        return self._arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that the arena has allocated, alignment included."""
        return self._arena.used_bytes

    @override
    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.KV_BLOB,
    ) -> TensorMemoryObj | BytesBufferMemoryObj | None:
        if fmt is MemoryFormat.BINARY_BUFFER:
            return self._buffers.allocate(shape, dtype, fmt)
        return self._arena.allocate(shape, dtype, fmt)

    @override
    def free(self, memory_obj: MemoryObj) -> None:
        """Free the memory regardless of references.

        Raises:
            IntegrityError: The object is already free, or belongs to another allocator.
        """
        self._side_of(memory_obj).free(memory_obj)

    @override
    def get_ref_count(self, memory_obj: MemoryObj) -> int:
        return self._side_of(memory_obj).get_ref_count(memory_obj)

    @override
    def check_integrity(self) -> None:
        self._arena.check_integrity()
        self._buffers.check_integrity()

    def _side_of(self, memory_obj: MemoryObj) -> PinMemoryAllocator | BufferAllocator:
        if isinstance(memory_obj, TensorMemoryObj):
            return self._arena
        if isinstance(memory_obj, BytesBufferMemoryObj):
            return self._buffers
        raise IntegrityError(f"a {type(memory_obj).__name__} was not handed out by this allocator")
