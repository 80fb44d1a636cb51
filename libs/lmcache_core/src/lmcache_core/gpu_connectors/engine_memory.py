"""Engine memory as the engine itself sees it. It checks a connector, so it shares no code with the
copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lmcache_core._typing import override
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.binding import layers_of
from lmcache_core.gpu_connectors.layout import KVLayout, LayerGroup, Order, Packing


class EngineMemory(Protocol):
    """Reads and writes single tokens of an engine's KV cache, as that engine does: by its own
    operator, or by plain indexing.
    """

    layout: KVLayout
    """The layout of the engine's KV."""

    def num_slots(self, group: int) -> tuple[int, int]:
        """Return the number of blocks of a group, and of slots in a block."""

    def write(self, group: int, layer: int, slot: int, cells: torch.Tensor) -> None:
        """Write a token's KV into a slot. `cells`: `[sides, num_kv_heads, head_size]` of the
        group's dtype, on the CPU.
        """

    def read(self, group: int, layer: int, slot: int) -> torch.Tensor:
        """Return the KV in a slot, in the form of `cells` in `write`."""

    def block_memory(self, group: int, block: int) -> Sequence[torch.Tensor]:
        """Return views of everything that `write` may change in a block, in all layers of the
        group.
        """


class LogicalMemory(EngineMemory):
    """The engine's tensors, indexed one token at a time by the shape that the engine gives them.

    Args:
        layout: The engine's own description of its tensors, taken from the engine and not from the
            connector.
        kvcaches: As for `PagedGPUConnector`.

    Raises:
        LayoutError: The tensors do not have the shape that the engine claims.
    """

    def __init__(self, layout: KVLayout, kvcaches: Any) -> None:
        self.layout = layout
        self._layers: list[list[tuple[torch.Tensor, ...]]] = []
        parts = layout.split(layers_of(layout, kvcaches))
        for group, layers in zip(layout.groups, parts, strict=True):
            tensors = [
                (layer,) if isinstance(layer, torch.Tensor) else tuple(layer) for layer in layers
            ]
            for i, of_layer in enumerate(tensors):
                if len(of_layer) != (2 if _is_pair(group) else 1) or any(
                    not _has_shape(group, tensor) for tensor in of_layer
                ):
                    shapes = [list(tensor.shape) for tensor in of_layer]
                    raise LayoutError(
                        f"layer {i} of group {group.name!r}: the engine has {shapes}, but says"
                        f" {group.tensor_shape()}"
                    )
            self._layers.append(tensors)

    @override
    def num_slots(self, group: int) -> tuple[int, int]:
        declared = self.layout.groups[group]
        shape = list(self._layers[group][0][0].shape)
        if declared.packing in (Packing.KV_FIRST, Packing.BLOCK_FIRST):
            shape.pop(0 if declared.packing is Packing.KV_FIRST else 1)
        is_headless = len(shape) == 3
        return shape[0], shape[1 if declared.order is Order.NHD or is_headless else 2]

    @override
    def write(self, group: int, layer: int, slot: int, cells: torch.Tensor) -> None:
        for side, cell in enumerate(cells):
            self._cells(group, layer, side, slot).copy_(cell)

    @override
    def read(self, group: int, layer: int, slot: int) -> torch.Tensor:
        sides = range(self.layout.groups[group].sides)
        return torch.stack(
            [self._cells(group, layer, side, slot).cpu().view(torch.uint8) for side in sides]
        ).view(self._layers[group][layer][0].dtype)

    @override
    def block_memory(self, group: int, block: int) -> Sequence[torch.Tensor]:
        is_behind_sides = self.layout.groups[group].packing is Packing.KV_FIRST
        return [
            tensor[:, block] if is_behind_sides else tensor[block]
            for layer in self._layers[group]
            for tensor in layer
        ]

    def _cells(self, group: int, layer: int, side: int, slot: int) -> torch.Tensor:
        """Return `[num_kv_heads, head_size]` of one token, sharing memory."""
        declared, tensors = self.layout.groups[group], self._layers[group][layer]
        block, offset = divmod(slot, self.num_slots(group)[1])
        if declared.packing is Packing.KV_FIRST:
            tokens = tensors[0][side, block]
        elif declared.packing is Packing.BLOCK_FIRST:
            tokens = tensors[0][block, side]
        else:
            tokens = tensors[side if _is_pair(declared) else 0][block]
        if tokens.ndim == 2:
            return tokens[offset].unsqueeze(0)
        cells = tokens[offset] if declared.order is Order.NHD else tokens[:, offset]
        if declared.packing is Packing.LAST_DIM:
            cells = cells[:, side * declared.head_size : (side + 1) * declared.head_size]
        return cells


def _is_pair(group: LayerGroup) -> bool:
    return group.packing is Packing.SPLIT and group.sides == 2


def _has_shape(group: LayerGroup, tensor: torch.Tensor) -> bool:
    shape = list(tensor.shape)
    if group.packing in (Packing.KV_FIRST, Packing.BLOCK_FIRST):
        if len(shape) != 5 or shape.pop(0 if group.packing is Packing.KV_FIRST else 1) != 2:
            return False
    elif group.sides == 1 and group.num_kv_heads == 1 and len(shape) == 3:
        shape.insert(2 if group.order is Order.NHD else 1, 1)
    if len(shape) != 4:
        return False
    heads = shape[2] if group.order is Order.NHD else shape[1]
    size = group.head_size * (2 if group.packing is Packing.LAST_DIM else 1)
    return (heads, shape[3]) == (group.num_kv_heads, size) and str(
        tensor.dtype
    ) == f"torch.{group.dtype}"
