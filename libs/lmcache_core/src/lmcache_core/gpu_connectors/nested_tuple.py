"""KV as a nested tuple of K and V tensors of the whole token sequence."""

from __future__ import annotations

from typing import Any

import torch

from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.gpu_connectors.content import check_format, checked_tensor
from lmcache_core.memory.base import MemoryObj

Slices = list[tuple[torch.Tensor, torch.Tensor]]


class VLLMNestedTupleGPUConnector(GPUConnectorInterface):
    """For KV given as `kvcaches`: `num_layers` pairs (K, V), each `[num_tokens, num_heads, head_size]` (any split of hidden_dim_size).

    Everything is checked before anything is written. Both directions have finished when they return.

    Args:
        hidden_dim_size: num_heads * head_size on this worker.
        num_layers: Number of layers.
    """

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """See `GPUConnectorInterface.from_gpu`; needs `kvcaches`."""
        for engine, chunk in (slices := self._slices(memory_obj, start, end, kwargs, is_filled=True)):
            chunk.view(engine.shape).copy_(engine, non_blocking=True)
        _finish(slices)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """See `GPUConnectorInterface.to_gpu`; needs `kvcaches`."""
        for engine, chunk in (slices := self._slices(memory_obj, start, end, kwargs, is_filled=False)):
            engine.copy_(chunk.view(engine.shape), non_blocking=True)
        _finish(slices)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """See `GPUConnectorInterface.get_shape`."""
        return torch.Size((2, self.num_layers, num_tokens, self.hidden_dim_size))

    def _slices(self, memory_obj: MemoryObj, start: int, end: int, kwargs: dict[str, Any], is_filled: bool) -> Slices:
        """The same tokens in engine memory and in the memory object, K and V of each layer, checked."""
        check_format(memory_obj)
        if kwargs.get("kvcaches") is None:
            raise ValueError("kvcaches is missing: pass the (K, V) tensors of every layer")
        if not 0 <= start <= end:
            raise LayoutError(f"[{start}, {end}) is not a range of tokens")
        layers = [tuple(pair) for pair in kwargs["kvcaches"]]
        if len(layers) != self.num_layers:
            raise LayoutError(f"kvcaches has {len(layers)} layers; the connector was made for {self.num_layers}")
        for i, pair in enumerate(layers):
            if len(pair) != 2:
                raise LayoutError(f"layer {i} of kvcaches has {len(pair)} tensors; expected the pair (K, V)")
            for side in pair:
                if side.ndim < 2 or side.shape[0] < end or side.shape[1:].numel() != self.hidden_dim_size or side.dtype != pair[0].dtype:
                    expected = f"[>={end}, … {self.hidden_dim_size}] of {pair[0].dtype}"
                    raise LayoutError(f"layer {i} of kvcaches is {tuple(side.shape)} of {side.dtype}; expected {expected}")
            if pair[0].dtype != layers[0][0].dtype:
                raise LayoutError(f"layer {i} of kvcaches is of {pair[0].dtype}, layer 0 of {layers[0][0].dtype}")
        blob = checked_tensor(memory_obj, self.get_shape(end - start), layers[0][0].dtype, is_filled)
        return [(side[start:end], blob[s, i]) for i, pair in enumerate(layers) for s, side in enumerate(pair)]


def _finish(slices: Slices) -> None:
    device = slices[0][0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
