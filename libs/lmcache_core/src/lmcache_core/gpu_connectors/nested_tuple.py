"""KV as a nested tuple of K and V tensors of the whole token sequence."""

from __future__ import annotations

from typing import Any

import torch

from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.memory.base import MemoryFormat, MemoryObj

KVLayer = tuple[torch.Tensor, torch.Tensor]


class VLLMNestedTupleGPUConnector(GPUConnectorInterface):
    """For KV given as `kvcaches`: `num_layers` pairs (K, V), each `[num_tokens, num_heads, head_size]` (any split of hidden_dim_size).

    Args:
        hidden_dim_size: num_heads * head_size on this worker.
        num_layers: Number of layers.
    """

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """See `GPUConnectorInterface.from_gpu`; needs `kvcaches`."""
        layers, blob = self._checked(memory_obj, start, end, kwargs)
        for i, (k, v) in enumerate(layers):
            blob[0, i].view(k[start:end].shape).copy_(k[start:end], non_blocking=True)
            blob[1, i].view(v[start:end].shape).copy_(v[start:end], non_blocking=True)
        if layers[0][0].is_cuda:
            torch.cuda.synchronize(layers[0][0].device)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """See `GPUConnectorInterface.to_gpu`; needs `kvcaches`."""
        layers, blob = self._checked(memory_obj, start, end, kwargs)
        for i, (k, v) in enumerate(layers):
            k[start:end].copy_(blob[0, i].view(k[start:end].shape), non_blocking=True)
            v[start:end].copy_(blob[1, i].view(v[start:end].shape), non_blocking=True)
        if layers[0][0].is_cuda:
            torch.cuda.synchronize(layers[0][0].device)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """See `GPUConnectorInterface.get_shape`."""
        return torch.Size((2, self.num_layers, num_tokens, self.hidden_dim_size))

    def _checked(self, memory_obj: MemoryObj, start: int, end: int, kwargs: dict[str, Any]) -> tuple[list[KVLayer], torch.Tensor]:
        """Check everything before anything is written."""
        if kwargs.get("kvcaches") is None:
            raise ValueError("kvcaches is missing: pass the (K, V) tensors of every layer")
        layers: list[KVLayer] = list(kwargs["kvcaches"])
        if len(layers) != self.num_layers:
            raise LayoutError(f"kvcaches has {len(layers)} layers; the connector was made for {self.num_layers}")
        if memory_obj.get_memory_format() is not MemoryFormat.KV_BLOB:
            raise LayoutError(f"the memory object is in format {memory_obj.get_memory_format().name}, not KV_BLOB")
        blob = memory_obj.tensor
        if blob.shape != self.get_shape(end - start):
            raise LayoutError(f"the memory object has shape {tuple(blob.shape)}; expected {tuple(self.get_shape(end - start))}")
        if not 0 <= start <= end:
            raise LayoutError(f"[{start}, {end}) is not a range of tokens")
        for i, pair in enumerate(layers):
            if len(pair) != 2:
                raise LayoutError(f"layer {i} of kvcaches has {len(pair)} tensors; expected the pair (K, V)")
            for side in pair:
                if side.shape[0] < end or side.shape[1:].numel() != self.hidden_dim_size or side.dtype != blob.dtype:
                    expected = f"[>={end}, … {self.hidden_dim_size}] of {blob.dtype}"
                    raise LayoutError(f"layer {i} of kvcaches is {tuple(side.shape)} of {side.dtype}; expected {expected}")
        return layers, blob
