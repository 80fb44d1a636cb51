"""KV as a nested tuple of K and V tensors of the whole token sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lmcache_core._typing import override
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.base import GPUConnectorInterface, check_format, checked_tensor
from lmcache_core.memory.base import MemoryFormat, MemoryObj
from lmcache_core.memory.views import bytes_under

MAX_WITH_GIL = 64 << 10
"""Up to so many bytes, letting other threads run takes longer than the copy."""


class _CheckedKV:
    """K of every layer, then V (the order in a memory object), checked once for many chunks.

    Args:
        kvcaches: The (K, V) tensors of every layer.
        hidden_dim_size: Required num_heads * head_size.

    Raises:
        LayoutError: The tensors are not as declared, or not all the same.
    """

    def __init__(self, kvcaches: Any, num_layers: int, hidden_dim_size: int) -> None:
        layers = [tuple(pair) for pair in kvcaches]
        if len(layers) != num_layers:
            raise LayoutError(
                f"kvcaches has {len(layers)} layers; the connector was made for {num_layers}"
            )
        for i, pair in enumerate(layers):
            if len(pair) != 2 or not all(isinstance(side, torch.Tensor) for side in pair):
                raise LayoutError(
                    f"layer {i} of kvcaches is {[type(side).__name__ for side in pair]}; expected"
                    " the pair (K, V) of tensors"
                )
        first = layers[0][0]
        self.source = kvcaches
        self.shape, self.dtype = first.shape, first.dtype
        self.hidden_dim_size = hidden_dim_size
        if len(self.shape) < 2 or self.shape[1:].numel() != hidden_dim_size:
            raise self._too_short(0)
        for i, pair in enumerate(layers):
            for side in pair:
                if side.shape != self.shape or side.dtype != self.dtype:
                    raise LayoutError(
                        f"layer {i} of kvcaches is {tuple(side.shape)} of {side.dtype}, layer 0"
                        f" {tuple(self.shape)} of {self.dtype}"
                    )
        self.sides: list[torch.Tensor] = [pair[side] for side in range(2) for pair in layers]
        self.dtypes = (self.dtype, str(self.dtype).removeprefix("torch."))
        self.token_bytes = hidden_dim_size * self.dtype.itemsize
        # Whether no two sides begin at the same address.
        self.are_apart = len({side.data_ptr() for side in self.sides}) == len(self.sides)
        self._views: list[memoryview] | None = None

    def slices(self, start: int, end: int) -> list[torch.Tensor]:
        if not 0 <= start <= end:
            raise LayoutError(f"[{start}, {end}) is not a range of tokens")
        if self.shape[0] < end:
            raise self._too_short(end)
        return [side[start:end] for side in self.sides]

    def views(self) -> list[memoryview]:
        """Return the bytes of each side; empty unless all are in host memory without gaps."""
        if self._views is None:
            is_whole = all(side.is_cpu and side.is_contiguous() for side in self.sides)
            self._views = [bytes_under(side.detach()) for side in self.sides] if is_whole else []
        return self._views

    def _too_short(self, end: int) -> LayoutError:
        return LayoutError(
            f"layer 0 of kvcaches is {tuple(self.shape)}; expected [>={end}, …"
            f" {self.hidden_dim_size}]"
        )


class VLLMNestedTupleGPUConnector(GPUConnectorInterface):
    """For KV passed as `kvcaches`: `num_layers` pairs (K, V), each `[num_tokens, num_heads,
    head_size]` (any split of hidden_dim_size); for loading also a function that allocates them for
    a number of tokens, called once the cache has answered.

    Everything is checked before anything is written. Both directions have finished when they
    return.

    Args:
        hidden_dim_size: num_heads * head_size on this worker.
    """

    reports_progress = True

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers

    @override
    def loading(self, kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """Call `kvcaches` with the number of tokens if it is a function that allocates them."""
        kvcaches = kwargs.get("kvcaches")
        return {**kwargs, "kvcaches": kvcaches(num_tokens)} if callable(kvcaches) else kwargs

    @override
    def checked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "checked_kv": self._kv(kwargs)}

    @override
    def is_on_host(self, kwargs: dict[str, Any]) -> bool:
        return all(side.is_cpu for side in self._kv(kwargs).sides)

    @override
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy from `kvcaches`, which is required."""
        kv, progress = self._kv(kwargs), kwargs.get("progress")
        views = self._views(kv, memory_obj, start, end)
        if views and not views[0][1].readonly:
            for i, (engine, chunk) in enumerate(views, 1):
                _move(engine, chunk)
                if progress is not None:
                    progress(i * len(chunk))
            return
        # Plain copies, independent of the mode in which the engine created its tensors; and faster.
        with torch.inference_mode():
            engine_sides = kv.slices(start, end)
            chunk_sides = self._slices(kv, memory_obj, end - start, is_filled=True)
            step_bytes = memory_obj.get_size() // len(engine_sides)
            # On a device nothing is filled until it has finished.
            is_host = engine_sides[0].device.type == "cpu"
            for i, (source, target) in enumerate(zip(engine_sides, chunk_sides, strict=True), 1):
                target.copy_(source, non_blocking=engine_sides[0].is_cuda)
                if progress is not None and is_host:
                    progress(i * step_bytes)
        _finish(engine_sides[0].device)

    @override
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy to `kvcaches`, which is required."""
        kv, progress = self._kv(kwargs), kwargs.get("progress")
        views = self._views(kv, memory_obj, start, end)
        if views and kv.are_apart:
            for i, (engine, chunk) in enumerate(views, 1):
                _move(chunk, engine)
                if progress is not None:
                    progress(i * len(chunk))
            return
        with torch.inference_mode():
            engine_sides = kv.slices(start, end)
            chunk_sides = self._slices(kv, memory_obj, end - start, is_filled=False)
            _require_apart(engine_sides)
            step_bytes = memory_obj.get_size() // len(engine_sides)
            for i, (target, source) in enumerate(zip(engine_sides, chunk_sides, strict=True), 1):
                target.copy_(source, non_blocking=engine_sides[0].is_cuda)
                if progress is not None:
                    progress(i * step_bytes)
        _finish(engine_sides[0].device)

    @override
    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size((2, self.num_layers, num_tokens, self.hidden_dim_size))

    def _kv(self, kwargs: dict[str, Any]) -> _CheckedKV:
        kvcaches, known = kwargs.get("kvcaches"), kwargs.get("checked_kv")
        if isinstance(known, _CheckedKV) and known.source is kvcaches:
            return known
        if kvcaches is None:
            raise ValueError("kvcaches is missing: pass the (K, V) tensors of every layer")
        return _CheckedKV(kvcaches, self.num_layers, self.hidden_dim_size)

    def _views(
        self, kv: _CheckedKV, memory_obj: MemoryObj, start: int, end: int
    ) -> list[tuple[memoryview, memoryview]]:
        """Return the bytes of these tokens in engine memory and in the memory object, in pairs.

        Empty if they are not copied as bytes: they are on a device or have gaps; or something is
        wrong, which `_slices` detects.
        """
        meta, side_bytes = memory_obj.metadata, (end - start) * kv.token_bytes
        if not (
            0 <= start <= end <= kv.shape[0]
            and meta.fmt is MemoryFormat.KV_BLOB
            and meta.shape == (2, self.num_layers, end - start, self.hidden_dim_size)
            and meta.dtype in kv.dtypes
            and (engine := kv.views())
        ):
            return []
        try:
            content = memory_obj.byte_array
        except ValueError:  # on a device
            return []
        low, high = start * kv.token_bytes, end * kv.token_bytes
        return [
            (view[low:high], content[i * side_bytes : (i + 1) * side_bytes])
            for i, view in enumerate(engine)
        ]

    def _slices(
        self, kv: _CheckedKV, memory_obj: MemoryObj, num_tokens: int, is_filled: bool
    ) -> Sequence[torch.Tensor]:
        check_format(memory_obj)
        blob = checked_tensor(memory_obj, self.get_shape(num_tokens), kv.dtype, is_filled)
        return blob.view(2 * self.num_layers, num_tokens, *kv.shape[1:]).unbind(0)


def _move(source: memoryview, target: memoryview) -> None:
    if len(source) <= MAX_WITH_GIL:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _require_apart(sides: list[torch.Tensor]) -> None:
    """Refuse to write to tensors that share memory, or to one whose elements do."""
    if sides[0].numel() == 0:
        return
    if len({side.data_ptr() for side in sides}) < len(sides):
        raise LayoutError(
            "two of the keys and values in kvcaches are the same memory: the result of writing"
            " there would be ambiguous"
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


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
