"""Memory objects over plain Python bytes, outside any arena."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.memory.base import DescribedMemoryObj, MemoryAllocatorInterface, MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.memory.views import tensor_over

if TYPE_CHECKING:
    import torch


class BytesBufferMemoryObj(DescribedMemoryObj):
    """Wraps bytes that the garbage collector owns; its reference count is always 1.

    Args:
        raw_bytes: The content, shared, not copied.
        metadata: What it holds; by default flat bytes in `BINARY_BUFFER` format.
    """

    def __init__(self, raw_bytes: bytes | bytearray | memoryview, metadata: MemoryObjMetadata | None = None) -> None:
        self._view = memoryview(raw_bytes).cast("B")
        super().__init__(metadata or MemoryObjMetadata((len(self._view),), None, 0, 0, 1, MemoryFormat.BINARY_BUFFER))

    def ref_count_up(self) -> None:
        """Nothing to count: Python owns the bytes."""

    def ref_count_down(self) -> None:
        """Nothing to count: Python owns the bytes."""

    def get_ref_count(self) -> int:
        """Always 1."""
        return 1

    @property
    def byte_array(self) -> memoryview:
        """See `MemoryObj.byte_array`."""
        return self._view

    @property
    def tensor(self) -> torch.Tensor:
        """See `MemoryObj.tensor`."""
        return tensor_over(self._view, self._metadata.shape, self._metadata.dtype)


class BufferAllocator(MemoryAllocatorInterface):
    """Makes `BytesBufferMemoryObj`s; never full.

    Args:
        device: Must be "cpu".
    """

    def __init__(self, device: str = "cpu") -> None:
        if device != "cpu":
            raise ValueError(f"device={device!r}: byte buffers live on the cpu")
        self.device = device

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype | str | None, fmt: MemoryFormat = MemoryFormat.BINARY_BUFFER
    ) -> BytesBufferMemoryObj:
        """See `MemoryAllocatorInterface.allocate`."""
        size = num_bytes(shape, dtype) if dtype is not None else math.prod(shape)
        return BytesBufferMemoryObj(bytearray(size), MemoryObjMetadata(tuple(shape), dtype, 0, 0, 1, fmt))

    def free(self, memory_obj: MemoryObj) -> None:
        """Nothing to do: Python owns the bytes."""

    def get_ref_count(self, memory_obj: MemoryObj) -> int:
        """Always 1."""
        return 1

    def check_integrity(self) -> None:
        """Nothing can be out of balance."""
