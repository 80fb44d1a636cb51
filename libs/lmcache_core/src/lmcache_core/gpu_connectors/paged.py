"""KV in the pages of a serving engine, addressed by a slot mapping."""

from __future__ import annotations

from typing import Any

import torch
from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.paged_gather import paged_gather
from lmcache_kernels.paged_scatter import paged_scatter

from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.memory.base import MemoryFormat, MemoryObj

Sides = tuple[list[torch.Tensor], list[torch.Tensor]]


class VLLMPagedMemGPUConnector(GPUConnectorInterface):
    """For KV in pages, given as two keyword arguments.

    - `kvcaches`: for each layer a pair (K, V), each `[num_blocks, block_size, num_heads, head_size]`, or one tensor
      `[2, num_blocks, block_size, num_heads, head_size]`. The heads of a token are contiguous; blocks and tokens may be strided.
    - `slot_mapping`: int64 `[num_tokens]` for the whole token sequence, `slot = block * block_size + offset`, on the pages' device or
      the CPU. It begins with -1 for the tokens whose KV the engine already has; `[start, end)` must not overlap them.

    The memory object may be on the pages' device or in host memory; both directions have finished when they return.

    Args:
        hidden_dim_size: num_heads * head_size on this worker.
        num_layers: Number of layers.
    """

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """See `GPUConnectorInterface.from_gpu`; needs `kvcaches` and `slot_mapping`. On an error the memory object is untouched."""
        keys, values = self._sides(kwargs)
        slots = _slots(kwargs, start, end)
        blob = self._blob(memory_obj, end - start)
        if blob.device.type == "cpu" and memory_obj.byte_array.readonly:
            raise LayoutError("the memory object is read-only")
        device = keys[0].device
        staged = blob if blob.device == device else torch.empty_like(blob, device=device)
        try:
            paged_gather(keys, values, slots, staged)
        except KernelInputError as exc:
            raise _layout_error(exc, start, end) from exc
        if staged is not blob:
            blob.copy_(staged)
        _finish(device)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """See `GPUConnectorInterface.to_gpu`; needs `kvcaches` and `slot_mapping`. On an error the pages are untouched."""
        keys, values = self._sides(kwargs)
        slots = _slots(kwargs, start, end)
        blob = self._blob(memory_obj, end - start)
        device = keys[0].device
        try:
            paged_scatter(keys, values, slots, blob.to(device))
        except KernelInputError as exc:
            raise _layout_error(exc, start, end) from exc
        _finish(device)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """See `GPUConnectorInterface.get_shape`."""
        return torch.Size((2, self.num_layers, num_tokens, self.hidden_dim_size))

    def _sides(self, kwargs: dict[str, Any]) -> Sides:
        """K and V of every layer; the ops check that they are alike."""
        if kwargs.get("kvcaches") is None:
            raise ValueError("kvcaches is missing: pass the pages of every layer")
        layers = list(kwargs["kvcaches"])
        if len(layers) != self.num_layers:
            raise LayoutError(f"kvcaches has {len(layers)} layers; the connector was made for {self.num_layers}")
        if any(len(layer) != 2 for layer in layers):
            raise LayoutError("each layer of kvcaches must be a pair (K, V) or one tensor [2, …]")
        keys, values = [layer[0] for layer in layers], [layer[1] for layer in layers]
        for i, side in enumerate((*keys, *values)):
            if side.ndim != 4 or side.shape[2] * side.shape[3] != self.hidden_dim_size:
                expected = f"[num_blocks, block_size, num_heads, head_size] with num_heads * head_size = {self.hidden_dim_size}"
                raise LayoutError(f"layer {i % self.num_layers} of kvcaches is {tuple(side.shape)}; expected {expected}")
        return keys, values

    def _blob(self, memory_obj: MemoryObj, num_tokens: int) -> torch.Tensor:
        if memory_obj.get_memory_format() is not MemoryFormat.KV_BLOB:
            raise LayoutError(f"the memory object is in format {memory_obj.get_memory_format().name}, not KV_BLOB")
        blob = memory_obj.tensor
        if blob.shape != self.get_shape(num_tokens):
            raise LayoutError(f"the memory object has shape {tuple(blob.shape)}; expected {tuple(self.get_shape(num_tokens))}")
        return blob


def _slots(kwargs: dict[str, Any], start: int, end: int) -> torch.Tensor:
    slot_mapping = kwargs.get("slot_mapping")
    if not isinstance(slot_mapping, torch.Tensor):
        raise ValueError("slot_mapping is missing: pass an int64 tensor with the slot of every token of the sequence")
    if slot_mapping.ndim != 1 or not 0 <= start <= end <= slot_mapping.shape[0]:
        raise LayoutError(f"tokens [{start}, {end}) are not all in slot_mapping, whose shape is {tuple(slot_mapping.shape)}")
    return slot_mapping[start:end]


def _layout_error(exc: KernelInputError, start: int, end: int) -> LayoutError:
    return LayoutError(f"tokens [{start}, {end}): {exc} (-1 marks the engine's own prefix, which these tokens must not overlap)")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
