"""Memory objects and allocators over torch tensors: host, pinned host, GPU, and pinned host
with byte buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_core._typing import override
from lmcache_core.memory.arena_tensors import device_arena, host_arena, pin
from lmcache_core.memory.base import MemoryFormat, MemoryObjMetadata
from lmcache_core.memory.counted import CountedMemoryObj, CountingAllocator
from lmcache_core.memory.dtypes import dtype_name
from lmcache_core.memory.free_list import ALIGN_BYTES as _ALIGN_BYTES
from lmcache_core.memory.free_list import FreeList
from lmcache_core.memory.views import bytes_under


class TensorMemoryObj(CountedMemoryObj):
    """A flat byte tensor with a description of what it holds.

    Args:
        raw_data: uint8, flat, at least `metadata.get_size()` elements, on any device.
        metadata: What it holds.
        allocator: Who takes it back; without one the tensor belongs to the garbage collector.
    """

    def __init__(
        self,
        raw_data: torch.Tensor,
        metadata: MemoryObjMetadata,
        allocator: CountingAllocator | None = None,
    ) -> None:
        super().__init__(metadata, allocator)
        self._raw = raw_data

    @property
    @override
    def byte_array(self) -> memoryview:
        """Host memory only.

        Raises:
            ValueError: The memory is on another device.
        """
        self._require_held()
        if self._raw.device.type != "cpu":
            raise ValueError(
                f"memory on {self._raw.device} has no bytes that this process can address: use"
                " .tensor, or copy it to the host"
            )
        return bytes_under(self._raw[: self.get_size()])

    @property
    @override
    def tensor(self) -> torch.Tensor:
        self._require_held()
        meta = self._metadata
        dtype = torch.uint8 if meta.dtype is None else getattr(torch, dtype_name(meta.dtype))
        return self._raw[: self.get_size()].view(dtype).view(tuple(meta.shape))


class TensorMemoryAllocator(CountingAllocator):
    """An explicit-list allocator over one byte tensor. Thread-safe.

    Args:
        tensor: Contiguous, on any device that has memory; its bytes become the arena.

    Raises:
        ValueError: The tensor is not contiguous, or has no memory.
    """

    ALIGN_BYTES = _ALIGN_BYTES

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or not tensor.is_contiguous():
            raise ValueError(
                f"an arena needs a contiguous tensor with memory, not strides {tensor.stride()} on"
                f" {tensor.device}"
            )
        self._raw = tensor.detach().view(-1).view(torch.uint8)
        super().__init__(FreeList(self._raw.numel()))

    @override
    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.KV_BLOB,
    ) -> TensorMemoryObj | None:
        meta = self._take(torch.Size(shape), dtype, fmt)
        return (
            None
            if meta is None
            else TensorMemoryObj(self._raw[meta.address : meta.address + meta.phy_size], meta, self)
        )


class HostMemoryAllocator(TensorMemoryAllocator):
    """An arena of plain host memory, aligned to a page and touched at construction.

    Args:
        size: Bytes.

    Raises:
        ValueError: The size is negative.
        CapacityError: The machine does not have that much.
    """

    def __init__(self, size: int) -> None:
        super().__init__(host_arena(size))


class PinMemoryAllocator(HostMemoryAllocator):
    """An arena of host memory that CUDA can copy from and to directly; without CUDA it is plain
    host memory.

    Args:
        size: Bytes.

    Attributes:
        is_pinned: Whether CUDA has its pages.

    Raises:
        ValueError: The size is negative.
        CapacityError: The machine does not have that much.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.is_pinned = pin(self._raw, self)


class GPUMemoryAllocator(TensorMemoryAllocator):
    """An arena on a device.

    Args:
        size: Bytes.
        device: "cuda", "cuda:1", …; "cpu" works too.

    Raises:
        ValueError: The size is negative.
        ConfigError: There is no such device.
        CapacityError: It does not have that much memory.
    """

    def __init__(self, size: int, device: str = "cuda") -> None:
        super().__init__(device_arena(size, device))
