"""The layout of KV: layer groups, their form in an engine's tensors, and in a memory object. No
torch.

A memory object contains each group as `[sides, num_layers, num_tokens, num_kv_heads * head_size]`,
whatever the engine's tensors look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

from lmcache_core.errors import LayoutError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE, dtype_name, num_bytes
from lmcache_core.record import TensorSpec

GROUP_ALIGN_BYTES = 512
MAX_CACHED_SPECS = 256

T = TypeVar("T")


class Order(StrEnum):
    """Order of the axes in the *shape* of an engine's tensor; its strides are arbitrary."""

    NHD = "NHD"
    """tokens, heads, elements"""
    HND = "HND"
    """heads, tokens, elements"""


class Packing(StrEnum):
    """Location of K and V, with B blocks and `…` the order of the other axes."""

    SPLIT = "split"
    """A pair (K, V) of tensors `[B, …]`; one tensor `[B, …]` if there is one side."""
    KV_FIRST = "kv_first"
    """One tensor `[2, B, …]`."""
    BLOCK_FIRST = "block_first"
    """One tensor `[B, 2, …]`."""
    LAST_DIM = "last_dim"
    """One tensor `[B, …]` whose last axis is K and then V of a head."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose KV has the same shape.

    Attributes:
        name: Name of the group in records; "" if it is the only one.
        num_kv_heads: KV heads on this worker; 1 for a latent.
        head_size: Elements of a head; for a latent all its elements (rank and rotary part).
        dtype: A `torch.dtype` or its name; stored as the name.
        sides: 2 for K and V, 1 for a latent that serves as both.
        order: Order of the axes of the engine's tensors.
        packing: Location of K and V in them; "split" for a latent. A latent's tensors may lack the
            axis of the single head.
        layers: Names of the layers in their order, for engines that pass their tensors by name.

    Raises:
        LayoutError: A field is invalid.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    sides: int = 2
    order: str = Order.NHD
    packing: str = Packing.SPLIT
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
            object.__setattr__(self, "order", Order(self.order))
            object.__setattr__(self, "packing", Packing(self.packing))
        except ValueError as exc:
            raise LayoutError(f"layer group {self.name!r}: {exc}") from exc
        if min(self.num_layers, self.num_kv_heads, self.head_size) < 1 or self.sides not in (1, 2):
            raise LayoutError(
                f"layer group {self.name!r}: layers, heads and head size must be positive, sides 1"
                f" or 2: {self}"
            )
        if self.sides == 1 and self.packing is not Packing.SPLIT:
            raise LayoutError(
                f"layer group {self.name!r}: packing={self.packing}: one side is not packed with"
                " another; say 'split'"
            )
        if self.layers and len(set(self.layers)) != self.num_layers:
            raise LayoutError(
                f"layer group {self.name!r}: {len(set(self.layers))} names for {self.num_layers}"
                " layers"
            )

    def shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """Return the shape of the group in a memory object."""
        return self.sides, self.num_layers, num_tokens, self.num_kv_heads * self.head_size

    def tensor_shape(self) -> str:
        """Return the shape of the engine's tensors of a layer, for display."""
        inner = (
            f"block_size, {self.num_kv_heads}"
            if self.order is Order.NHD
            else f"{self.num_kv_heads}, block_size"
        )
        size = self.head_size * (2 if self.packing is Packing.LAST_DIM else 1)
        front = {Packing.KV_FIRST: "2, num_blocks", Packing.BLOCK_FIRST: "num_blocks, 2"}.get(
            Packing(self.packing), "num_blocks"
        )
        shape = f"[{front}, {inner}, {size}]"
        return f"a pair of {shape}" if self.sides == 2 and self.packing is Packing.SPLIT else shape


@dataclass(frozen=True)
class KVLayout:
    """The KV of a model on one worker.

    Attributes:
        groups: Its layer groups, each with a unique name, in the order in which a memory object
            contains them.

    Raises:
        LayoutError: There is no group, or two have the same name.
    """

    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups or len({group.name for group in self.groups}) != len(self.groups):
            raise LayoutError(
                "a layout needs groups with different names, not"
                f" {[group.name for group in self.groups]}"
            )

    @property
    def kv_dtype(self) -> str:
        """Dtype of a memory object's elements: that of all groups, or "uint8" if they differ."""
        dtypes = {group.dtype for group in self.groups}
        return dtypes.pop() if len(dtypes) == 1 else "uint8"

    def fingerprint(self) -> str:
        """Return a text that is equal for two layouts exactly if their memory objects mean the
        same.

        Order, packing and layer names of the engine's tensors are not included: they do not affect
        a memory object.
        """
        parts = (
            f"{g.name!r}:{g.sides}x{g.num_layers}x{g.num_kv_heads}x{g.head_size}:{g.dtype}"
            for g in self.groups
        )
        return "kv/1;" + ";".join(parts)

    def tensor_specs(self, num_tokens: int) -> tuple[TensorSpec, ...]:
        """Return the position of each group in a memory object of that many tokens, in bytes; each
        begins at a multiple of 512.
        """
        return _tensor_specs(self.groups, num_tokens)

    def split(self, layers: Sequence[T]) -> list[Sequence[T]]:
        """Split a sequence over all layers, group after group, into the parts of the groups."""
        parts, at = [], 0
        for group in self.groups:
            parts.append(layers[at : at + group.num_layers])
            at += group.num_layers
        return parts

    def num_bytes(self, num_tokens: int) -> int:
        """Return the size in bytes of a memory object of that many tokens."""
        last = self.tensor_specs(num_tokens)[-1]
        return last.offset + last.length

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """Return the shape of a memory object in elements of `kv_dtype`: `[sides, num_layers,
        num_tokens, hidden]` for one group, else flat.
        """
        if len(self.groups) == 1:
            return self.groups[0].shape(num_tokens)
        return (self.num_bytes(num_tokens) // DTYPE_ITEMSIZE[self.kv_dtype],)


@lru_cache(MAX_CACHED_SPECS)  # nearly all chunks of a process have the same length
def _tensor_specs(groups: tuple[LayerGroup, ...], num_tokens: int) -> tuple[TensorSpec, ...]:
    specs, at = [], 0
    for group in groups:
        at = -(-at // GROUP_ALIGN_BYTES) * GROUP_ALIGN_BYTES
        shape = group.shape(num_tokens)
        length = num_bytes(shape, group.dtype)
        specs.append(TensorSpec(group.name, group.dtype, shape, at, length))
        at += length
    return tuple(specs)


def gaps_between(specs: Sequence[TensorSpec]) -> list[slice]:
    """Return the bytes of a memory object that belong to no group."""
    ends = [spec.offset + spec.length for spec in specs]
    return [
        slice(end, spec.offset)
        for end, spec in zip(ends, specs[1:], strict=False)
        if end < spec.offset
    ]
