"""Matches an engine's tensors with a layout: makes pages for the kernels from `kvcaches`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from lmcache_kernels.pages import Pages

from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.layout import KVLayout, LayerGroup, Order, Packing


@dataclass(frozen=True, eq=False)
class Binding:
    """A layout and the pages of its groups.

    Attributes:
        pages: Pages of each group, in the order of the groups; all on one device.
    """

    layout: KVLayout
    pages: tuple[Pages, ...]

    @property
    def device(self) -> torch.device:
        """The pages' device."""
        return self.pages[0].device

    @cached_property
    def sharing(self) -> tuple[tuple[int, int], ...]:
        """Pairs of groups in the same memory, by their numbers: a block belongs to one of them."""
        starts = [{page.data_ptr() for page in pages.tensors} for pages in self.pages]
        return tuple(
            (i, j) for i, j in combinations(range(len(starts)), 2) if starts[i] & starts[j]
        )


def bind_declared(layout: KVLayout, kvcaches: Any) -> Binding:
    """Match tensors with a declared layout.

    Args:
        kvcaches: The tensors (or pairs) of each layer, group after group; or by layer name, as in
            `LayerGroup.layers`, or in that order if the groups name no layers.

    Raises:
        LayoutError: They are not as declared.
        KernelInputError: See `Pages.of`.
    """
    pages = []
    parts = layout.split(layers_of(layout, kvcaches))
    for group, layers in zip(layout.groups, parts, strict=True):
        sides = [
            layer_sides(group, layer, f"layer {i} of group {group.name!r}")
            for i, layer in enumerate(layers)
        ]
        pages.append(Pages.of(*zip(*sides, strict=True)))
    return Binding(layout, tuple(pages))


def bind_pairs(num_layers: int, hidden_size: int, kvcaches: Any) -> Binding:
    """Match tensors with the arguments of the documented paged connectors; heads and dtype are
    taken from the tensors.

    Args:
        hidden_size: Required num_heads * head_size.
        kvcaches: For each layer a pair (K, V) or one tensor `[2, …]`; K and V are `[num_blocks,
            block_size, num_heads, head_size]`.

    Raises:
        LayoutError: They do not match.
        KernelInputError: See `Pages.of`.
    """
    layers = list(kvcaches)
    if len(layers) != num_layers:
        raise LayoutError(
            f"kvcaches has {len(layers)} layers; the connector was made for {num_layers}"
        )
    sides = []
    for i, layer in enumerate(layers):
        is_tensor = isinstance(layer, torch.Tensor)
        if (is_tensor and (layer.ndim != 5 or layer.shape[0] != 2)) or len(layer) != 2:
            raise LayoutError(
                f"layer {i} of kvcaches must be a pair (K, V) or one tensor [2, …], not"
                f" {_described(layer)}"
            )
        pair = layer[0], layer[1]
        if any(
            not isinstance(side, torch.Tensor)
            or side.ndim != 4
            or side.shape[2] * side.shape[3] != hidden_size
            for side in pair
        ):
            raise LayoutError(
                f"layer {i} of kvcaches is {_described(layer)}; expected [num_blocks, block_size,"
                f" num_heads, head_size] with num_heads * head_size = {hidden_size}"
            )
        sides.append(pair)
    pages = Pages.of(*zip(*sides, strict=True))
    heads, head_size = sides[0][0].shape[2:]
    group = LayerGroup("", num_layers, heads, head_size, _named(pages.dtype))
    return Binding(KVLayout((group,)), (pages,))


def layers_of(layout: KVLayout, kvcaches: Any) -> list[Any]:
    """Return the tensor (or pair) of each layer, group after group.

    Args:
        kvcaches: In that order; or by layer name.

    Raises:
        LayoutError: A layer is missing, or there are too many.
    """
    num_layers = sum(group.num_layers for group in layout.groups)
    if isinstance(kvcaches, Mapping):
        names = [name for group in layout.groups for name in group.layers]
        if names:
            missing = [name for name in names if name not in kvcaches]
            if missing or len(names) != num_layers:
                raise LayoutError(
                    f"kvcaches lacks {missing or 'layers of groups that name none'}; it has"
                    f" {list(kvcaches)[:8]}"
                )
            return [kvcaches[name] for name in names]
        kvcaches = kvcaches.values()
    layers = list(kvcaches)
    if len(layers) != num_layers:
        raise LayoutError(f"kvcaches has {len(layers)} layers; the layout has {num_layers}")
    return layers


def layer_sides(group: LayerGroup, layer: Any, name: str) -> tuple[torch.Tensor, ...]:
    """Return K and V of a layer (or its latent) as views `[num_blocks, block_size, num_kv_heads,
    head_size]`.

    Args:
        layer: Its tensor, or pair.
        name: Name of the layer in errors.

    Raises:
        LayoutError: It does not match.
    """
    wrong = LayoutError(
        f"{name} is {_described(layer)}; declared is {group.tensor_shape()} of {group.dtype}"
    )
    if group.packing is Packing.SPLIT and group.sides == 2:
        if not isinstance(layer, (tuple, list)) or len(layer) != 2:
            raise wrong
        sides = tuple(layer)
    elif not isinstance(layer, torch.Tensor):
        raise wrong
    elif group.packing is Packing.SPLIT:
        one_head = group.num_kv_heads == 1 and layer.ndim == 3
        sides = (layer.unsqueeze(2 if group.order is Order.NHD else 1) if one_head else layer,)
    elif group.packing is Packing.LAST_DIM:
        if layer.ndim != 4 or layer.shape[3] != 2 * group.head_size:
            raise wrong
        sides = layer.tensor_split(2, 3)
    else:
        axis = 0 if group.packing is Packing.KV_FIRST else 1
        if layer.ndim != 5 or layer.shape[axis] != 2:
            raise wrong
        sides = layer.unbind(axis)
    for side in sides:
        heads_axis = 2 if group.order is Order.NHD else 1
        if (
            not isinstance(side, torch.Tensor)
            or side.ndim != 4
            or _named(side.dtype) != group.dtype
        ):
            raise wrong
        if side.shape[3] != group.head_size or side.shape[heads_axis] != group.num_kv_heads:
            raise wrong
    return tuple(side if group.order is Order.NHD else side.transpose(1, 2) for side in sides)


def signature_of(kvcaches: Any) -> tuple[Any, ...]:
    """Return a value that is equal for the same tensors: address, shape, strides, dtype and device.

    Raises:
        LayoutError: An item is not a tensor.
    """
    items: Iterable[Any] = (
        kvcaches.items() if isinstance(kvcaches, Mapping) else enumerate(kvcaches)
    )
    facts: list[Any] = []
    for name, layer in items:
        facts.append(name)
        tensors = layer if isinstance(layer, (tuple, list)) else (layer,)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise LayoutError(f"kvcaches[{name!r}] holds {type(tensor).__name__}, not tensors")
            facts += (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tuple(facts)


def _described(layer: Any) -> str:
    if isinstance(layer, torch.Tensor):
        return f"{list(layer.shape)} of {_named(layer.dtype)}"
    if isinstance(layer, (tuple, list)):
        return "(" + ", ".join(_described(side) for side in layer) + ")"
    return type(layer).__name__


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
