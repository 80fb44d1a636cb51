"""Memory objects and allocators over torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_core.memory.arena import ArenaAllocator
from lmcache_core.memory.base import DescribedMemoryObj, MemoryAllocatorInterface, MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.memory.free_list import ALIGN_BYTES as _ALIGN_BYTES
from lmcache_core.memory.views import bytes_under


class TensorMemoryObj(DescribedMemoryObj):
    """A flat byte tensor with a description of what it holds.

    Args:
        raw_data: uint8, flat, at least `metadata.get_size()` elements.
        metadata: What it holds.
        allocator: Who takes it back; without one the tensor belongs to the garbage collector.
    """

    def __init__(self, raw_data: torch.Tensor, metadata: MemoryObjMetadata, allocator: TensorMemoryAllocator | None = None) -> None:
        self._raw = raw_data
        super().__init__(metadata)
        self._allocator = allocator

    def ref_count_up(self) -> None:
        """See `MemoryObj.ref_count_up`."""
        if self._allocator is not None:
            self._allocator.change_ref_count(self, +1)

    def ref_count_down(self) -> None:
        """See `MemoryObj.ref_count_down`."""
        if self._allocator is not None:
            self._allocator.change_ref_count(self, -1)

    @property
    def byte_array(self) -> memoryview:
        """See `MemoryObj.byte_array`. CPU tensors only."""
        return bytes_under(self._raw[: self.get_size()])

    @property
    def tensor(self) -> torch.Tensor:
        """See `MemoryObj.tensor`."""
        meta = self._metadata
        dtype = torch.uint8 if meta.dtype is None else getattr(torch, dtype_name(meta.dtype))
        return self._raw[: self.get_size()].view(dtype).view(tuple(meta.shape))


class TensorMemoryAllocator(MemoryAllocatorInterface):
    """An explicit-list allocator over one byte tensor. Thread-safe.

    Args:
        tensor: Contiguous CPU tensor; its bytes become the arena.

    Raises:
        ValueError: The tensor is not contiguous, or not on the CPU.
    """

    ALIGN_BYTES = _ALIGN_BYTES

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"an arena needs a contiguous CPU tensor, not strides {tensor.stride()} on {tensor.device}")
        self._raw = tensor.view(-1).view(torch.uint8)
        self._arena = ArenaAllocator(bytes_under(self._raw))

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be handed out."""
        return self._arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes handed out, alignment included."""
        return self._arena.used_bytes

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype | str | None, fmt: MemoryFormat = MemoryFormat.KV_BLOB
    ) -> TensorMemoryObj | None:
        """See `MemoryAllocatorInterface.allocate`."""
        piece = self._arena.allocate(shape, dtype, fmt)
        if piece is None:
            return None
        meta = piece.metadata
        return TensorMemoryObj(self._raw[meta.address : meta.address + meta.phy_size], meta, self)

    def change_ref_count(self, memory_obj: MemoryObj, by: int) -> None:
        """Add `by` to the object's references and free it at zero."""
        self._arena.change_ref_count(memory_obj, by)

    def free(self, memory_obj: MemoryObj) -> None:
        """See `MemoryAllocatorInterface.free`."""
        self._arena.free(memory_obj)

    def get_ref_count(self, memory_obj: MemoryObj) -> int:
        """See `MemoryAllocatorInterface.get_ref_count`."""
        return memory_obj.metadata.ref_count

    def check_integrity(self) -> None:
        """See `MemoryAllocatorInterface.check_integrity`."""
        self._arena.check_integrity()


class HostMemoryAllocator(TensorMemoryAllocator):
    """An arena of plain host memory, touched at construction.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(torch.empty(size, dtype=torch.uint8).zero_())  # torch.zeros would leave the touching to the first use
