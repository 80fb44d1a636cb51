"""The tensor in a memory object, checked before anybody copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_core.errors import LayoutError
from lmcache_core.memory.base import MemoryFormat, MemoryObj


def check_format(memory_obj: MemoryObj) -> None:
    """Refuse a memory object that is not in KV_BLOB format.

    Raises:
        LayoutError: It is in another format.
    """
    if memory_obj.get_memory_format() is not MemoryFormat.KV_BLOB:
        raise LayoutError(
            f"the memory object is in format {memory_obj.get_memory_format().name}, not KV_BLOB"
        )


def checked_tensor(
    memory_obj: MemoryObj, shape: Sequence[int], dtype: torch.dtype, is_filled: bool
) -> torch.Tensor:
    """Return the tensor in a memory object.

    Args:
        memory_obj: Of any format.
        shape: What its shape must be.
        dtype: What its dtype must be.
        is_filled: Whether the caller is going to write to it.

    Raises:
        LayoutError: It has another shape or dtype, is not contiguous, or must not be written.
        AssertionError: It holds no tensor.
    """
    tensor: torch.Tensor | None = memory_obj.tensor
    assert tensor is not None, "the memory object holds no tensor"
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or not tensor.is_contiguous():
        got = (
            f"{tuple(tensor.shape)} of"
            f" {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
        )
        raise LayoutError(f"the memory object is {got}; expected {tuple(shape)} of {dtype}")
    if is_filled and tensor.device.type == "cpu" and memory_obj.byte_array.readonly:
        raise LayoutError("the memory object is read-only")
    return tensor
