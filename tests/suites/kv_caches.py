"""Small engine memory of any layout, full of random bytes, and what it takes to see whether it
was touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lmcache_core.gpu_connectors.layout import KVLayout, LayerGroup, Order, Packing

NUM_BLOCKS, BLOCK_SIZE = 7, 4


def one_group(**fields: Any) -> KVLayout:
    """A layout of one group: two layers, three heads of five elements."""
    values: dict[str, Any] = {
        "name": "",
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_size": 5,
        "dtype": "bfloat16",
    }
    return KVLayout((LayerGroup(**(values | fields)),))


def random_tensor(
    shape: Sequence[int], dtype: str, seed: int, is_strided: bool = False
) -> torch.Tensor:
    """Random bytes in that shape; strided, its memory has the second and third last axes
    swapped.
    """
    kind: torch.dtype = getattr(torch, dtype)
    sizes = list(shape)
    if is_strided:
        sizes[-2], sizes[-3] = sizes[-3], sizes[-2]
    random = torch.Generator().manual_seed(seed)
    tensor = torch.randint(
        0, 256, (*sizes[:-1], sizes[-1] * kind.itemsize), dtype=torch.uint8, generator=random
    ).view(kind)
    return tensor.transpose(-2, -3) if is_strided else tensor


def make_kv_caches(
    layout: KVLayout,
    seed: int,
    is_strided: bool = False,
    is_headless: bool = False,
    sizes: tuple[int, int] = (NUM_BLOCKS, BLOCK_SIZE),
) -> list[Any]:
    """An engine's tensors for a layout, group after group, full of random bytes.

    Args:
        layout: The layout.
        seed: Of the bytes.
        is_strided: Give the axes another order in memory than in the shape.
        is_headless: Leave out the axis of a latent's only head.
        sizes: Blocks, and tokens in a block.
    """
    num_blocks, block_size = sizes
    layers: list[Any] = []
    for group in layout.groups:
        inner = (
            (block_size, group.num_kv_heads)
            if group.order is Order.NHD
            else (group.num_kv_heads, block_size)
        )
        size = group.head_size * (2 if group.packing is Packing.LAST_DIM else 1)
        front = {Packing.KV_FIRST: (2, num_blocks), Packing.BLOCK_FIRST: (num_blocks, 2)}.get(
            Packing(group.packing), (num_blocks,)
        )
        shape: tuple[int, ...] = (*front, *inner, size)
        if is_headless and group.sides == 1:
            shape = (num_blocks, block_size, size)
        for _ in range(group.num_layers):
            seed += 2
            if group.packing is Packing.SPLIT and group.sides == 2:
                layers.append(
                    tuple(
                        random_tensor(shape, group.dtype, seed * 1000 + side, is_strided)
                        for side in range(2)
                    )
                )
            else:
                layers.append(
                    random_tensor(shape, group.dtype, seed * 1000, is_strided and len(shape) > 3)
                )
    return layers


def overlapping(tensor: torch.Tensor) -> torch.Tensor:
    """That shape, but all heads (or all tokens of a block) are the same memory."""
    axis = -2 if tensor.shape[-2] > 1 else -3
    return tensor.narrow(axis, 0, 1).expand(tensor.shape)


def snapshot(engine: Any) -> list[torch.Tensor]:
    """Copies of all memory under the tensors in an engine, what lies between their elements
    included.
    """
    found = []
    for item in engine if isinstance(engine, (list, tuple)) else ():
        if isinstance(item, torch.Tensor):
            found.append(torch.empty(0, dtype=torch.uint8).set_(item.untyped_storage()).clone())
        else:
            found += snapshot(item)
    return found


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether two snapshots are equal bit for bit."""
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )
