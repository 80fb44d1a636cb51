"""KV as a nested tuple of K and V tensors of the whole token sequence."""

from __future__ import annotations

from typing import Any

import torch

from lmcache_core._typing import override
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.base import GPUConnectorInterface, check_format, checked_tensor
from lmcache_core.memory.base import MemoryObj

Slices = list[tuple[torch.Tensor, torch.Tensor]]


class VLLMNestedTupleGPUConnector(GPUConnectorInterface):
    """For KV given as `kvcaches`: `num_layers` pairs (K, V), each `[num_tokens, num_heads,
    head_size]` (any split of hidden_dim_size).

    Everything is checked before anything is written. Both directions have finished when they
    return.

    Args:
        hidden_dim_size: num_heads * head_size on this worker.
        num_layers: Number of layers.
    """

    reports_progress = True

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers

    @override
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy from `kvcaches`, which must be given."""
        progress = kwargs.get("progress")
        # Plain copies, in whatever mode the engine made its tensors; and faster.
        with torch.inference_mode():
            slices = self._slices(memory_obj, start, end, kwargs, is_filled=True)
            step_bytes = memory_obj.get_size() // len(slices)
            # On a device nothing is filled before it has finished.
            is_host = slices[0][0].device.type == "cpu"
            for i, (engine, chunk) in enumerate(slices, 1):
                chunk.copy_(engine, non_blocking=True)
                if progress is not None and is_host:
                    progress(i * step_bytes)
        _finish(slices)

    @override
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy to `kvcaches`, which must be given."""
        progress = kwargs.get("progress")
        with torch.inference_mode():
            slices = self._slices(memory_obj, start, end, kwargs, is_filled=False)
            _require_apart([engine for engine, _ in slices])
            step_bytes = memory_obj.get_size() // len(slices)
            for i, (engine, chunk) in enumerate(slices, 1):
                engine.copy_(chunk, non_blocking=True)
                if progress is not None:
                    progress(i * step_bytes)
        _finish(slices)

    @override
    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size((2, self.num_layers, num_tokens, self.hidden_dim_size))

    def _slices(
        self, memory_obj: MemoryObj, start: int, end: int, kwargs: dict[str, Any], is_filled: bool
    ) -> Slices:
        """Return the same tokens in engine memory and in the memory object, K of every layer, then
        V, checked.
        """
        check_format(memory_obj)
        if kwargs.get("kvcaches") is None:
            raise ValueError("kvcaches is missing: pass the (K, V) tensors of every layer")
        if not 0 <= start <= end:
            raise LayoutError(f"[{start}, {end}) is not a range of tokens")
        layers = [tuple(pair) for pair in kwargs["kvcaches"]]
        if len(layers) != self.num_layers:
            raise LayoutError(
                f"kvcaches has {len(layers)} layers; the connector was made for {self.num_layers}"
            )
        shape, dtype = self._checked_sides(layers, end)
        blob = checked_tensor(memory_obj, self.get_shape(end - start), dtype, is_filled)
        keys, values = blob.view(2, self.num_layers, end - start, *shape[1:]).unbind(0)
        # In the memory object's order: K of all layers, then V.
        sides = [pair[side][start:end] for side in range(2) for pair in layers]
        return list(zip(sides, (*keys.unbind(0), *values.unbind(0)), strict=True))

    def _checked_sides(
        self, layers: list[tuple[torch.Tensor, ...]], end: int
    ) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and dtype of K and V, which all layers have in common."""
        for i, pair in enumerate(layers):
            if len(pair) != 2 or not (
                isinstance(pair[0], torch.Tensor) and isinstance(pair[1], torch.Tensor)
            ):
                raise LayoutError(
                    f"layer {i} of kvcaches is {[type(side).__name__ for side in pair]}; expected"
                    " the pair (K, V) of tensors"
                )
        first = layers[0][0]
        shape, dtype = first.shape, first.dtype
        if len(shape) < 2 or shape[0] < end or shape[1:].numel() != self.hidden_dim_size:
            raise LayoutError(
                f"layer 0 of kvcaches is {tuple(shape)}; expected [>={end}, …"
                f" {self.hidden_dim_size}]"
            )
        for i, pair in enumerate(layers):
            for side in pair:
                if side.shape != shape or side.dtype != dtype:
                    raise LayoutError(
                        f"layer {i} of kvcaches is {tuple(side.shape)} of {side.dtype}, layer 0"
                        f" {tuple(shape)} of {dtype}"
                    )
        return shape, dtype


def _require_apart(sides: list[torch.Tensor]) -> None:
    """Refuse to write tensors that are the same memory, or one whose elements are.

    Raises:
        LayoutError: What would be written there is ambiguous.
    """
    if sides[0].numel() == 0:
        return
    if len({side.data_ptr() for side in sides}) < len(sides):
        raise LayoutError(
            "two of the keys and values in kvcaches are the same memory: what would be written"
            " there is ambiguous"
        )
    for side in sides:
        if side.is_contiguous():
            continue
        extent = 1
        for stride, size in sorted(
            (stride, size)
            for size, stride in zip(side.shape, side.stride(), strict=True)
            if size > 1
        ):
            if stride < extent:
                raise LayoutError(
                    f"elements of kvcaches overlap (shape {tuple(side.shape)}, strides"
                    f" {side.stride()})"
                )
            extent += (size - 1) * stride


def _finish(slices: Slices) -> None:
    device = slices[0][0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
