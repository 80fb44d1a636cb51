"""Interface of GPU connectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.streams import LaunchedCopies
from lmcache_core.memory.base import MemoryFormat, MemoryObj

if TYPE_CHECKING:
    from lmcache_core.record import TensorSpec


class GPUConnectorInterface(ABC):
    """Copies the KV of `[start, end)` between a serving engine's memory and a memory object in
    KV_BLOB format.
    """

    reports_progress = False
    """Whether the connector copies a chunk in the order of its bytes, so that a digest can follow
    while they are in the processor's cache. `from_gpu` and `to_gpu` then accept one more keyword
    argument, `progress`: called from time to time, in the same thread, with the number of bytes of
    the memory object, from the first, that have been filled or copied. It must not create tensors:
    it may run in inference mode.
    """

    @abstractmethod
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Fill the memory object, whose shape is `get_shape(end - start)`, from the serving engine.

        Args:
            memory_obj: Filled; the caller holds a reference.
            start: First token.
            end: One past the last token.
            **kwargs: The serving engine's memory, as each connector defines it.

        Raises:
            ValueError: A kwarg is missing, or engine memory or memory object do not have the
                declared shape, dtype or format.
        """

    @abstractmethod
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Fill the serving engine's memory from the memory object. Arguments and errors as in
        `from_gpu`.
        """

    @abstractmethod
    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of the memory object for that many tokens: `[2, num_layers, num_tokens,
        hidden_dim]`.
        """

    def checked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of `from_gpu` and `to_gpu`, with the results of one check
        for all chunks of a call.
        """
        return kwargs

    def loading(self, kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """Return the keyword arguments for loading so many tokens from the first: the cache has
        answered, and memory for them may be allocated now.
        """
        return kwargs

    def launching(self, kwargs: dict[str, Any], launched: LaunchedCopies) -> dict[str, Any]:
        """Return arguments with which `from_gpu` and `to_gpu` may return while their copies run:
        they add these to `launched`. Keep the arguments and the memory objects until all have
        ended.

        Args:
            kwargs: What `checked` has returned.
            launched: Empty if all copies have ended.
        """
        return kwargs

    def is_on_host(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the serving engine's memory is in host memory, and several threads may
        copy different chunks at once.

        Args:
            kwargs: What `checked` has returned.
        """
        return False

    def tensor_specs(self, num_tokens: int) -> tuple[TensorSpec, ...] | None:
        """Return each tensor's group, dtype, shape, and position in the memory object in bytes;
        None if there is just the tensor of `get_shape`.
        """
        return None


def check_format(memory_obj: MemoryObj) -> None:
    """Refuse a memory object that is not in KV_BLOB format.

    Raises:
        LayoutError: It is in another format.
    """
    found = memory_obj.get_memory_format()
    if found is not MemoryFormat.KV_BLOB:
        raise LayoutError(f"the memory object is in format {found.name}, not KV_BLOB")


def checked_tensor(
    memory_obj: MemoryObj, shape: Sequence[int], dtype: torch.dtype, is_filled: bool
) -> torch.Tensor:
    """Return the tensor in a memory object.

    Args:
        memory_obj: Memory object of any format.
        shape: Required shape.
        dtype: Required dtype.
        is_filled: Whether the caller is going to write to it.

    Raises:
        LayoutError: It has another shape or dtype, is not contiguous, or must not be written.
        AssertionError: It contains no tensor.
    """
    tensor: torch.Tensor | None = memory_obj.tensor
    assert tensor is not None, "the memory object contains no tensor"
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or not tensor.is_contiguous():
        got = f"{tuple(tensor.shape)} of {tensor.dtype}"
        got += "" if tensor.is_contiguous() else ", not contiguous"
        raise LayoutError(f"the memory object is {got}; expected {tuple(shape)} of {dtype}")
    if is_filled and tensor.device.type == "cpu" and memory_obj.byte_array.readonly:
        raise LayoutError("the memory object is read-only")
    return tensor
