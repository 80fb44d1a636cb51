"""SGLang's pools of KV, as our connectors address them. Imports nothing of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.layout import KVLayout, LayerGroup
from lmcache_core.memory.dtypes import dtype_name

POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Classes whose whole content are the tensors below; subclasses may add scales, or pack tokens."""


NUM_BANDS = 4
"""The layers are loaded in so many parts, so that SGLang begins to compute before all are there."""


@dataclass(frozen=True)
class Pool:
    """The KV of all layers on one rank.

    Attributes:
        layout: Its groups are bands of consecutive layers.
        kvcaches: For each layer a pair (K, V) of tensors `[num_pages, page_size, num_heads,
            head_size]`, or the latent `[num_pages, page_size, 1, size]`: views of the pool.
        is_latent: All ranks have the same KV.
    """

    layout: KVLayout
    kvcaches: Sequence[Any]
    is_latent: bool

    @property
    def num_layers(self) -> int:
        """Layers of all bands."""
        return len(self.kvcaches)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        first = self.kvcaches[0]
        tensor: torch.Tensor = first[0] if isinstance(first, tuple) else first
        return tensor.device


def pool_of(kvcache: Any, page_size: int) -> Pool:
    """Describe a pool.

    Args:
        kvcache: SGLang's `KVCache`.

    Raises:
        LayoutError: It holds more than K and V of full attention, or in another order.

    Source: `mem_cache/memory_pool.py` and `mem_cache/device_pool_info.py` of SGLang 0.5.23.
    """
    kind = type(kvcache).__name__
    if kind not in POOLS:
        raise LayoutError(
            f"the model's KV is in a {kind}, of sliding windows, recurrent state, an indexer or a"
            f" packed layout; only {' and '.join(POOLS)} can be cached"
        )
    (described,) = kvcache.get_device_pool_infos()
    info = described.buffer_info
    if info.scales is not None or getattr(info, "packed_fp8", False):
        raise LayoutError(f"kv_cache_dtype: the {kind} has scales beside its KV")
    name = dtype_name(info.dtype)
    if kind == "MLATokenToKVPool":
        layers = [_pages(tensor, page_size) for tensor in info.buffers]
        return Pool(_in_bands(len(layers), 1, layers[0].shape[3], name, 1), layers, True)
    order = str(getattr(info.buffers.layout, "value", info.buffers.layout))
    if order != "nhd":
        raise LayoutError(f"the {kind} is in the order {order}; only nhd can be cached")
    if info.head_dim != info.v_head_dim:
        raise LayoutError(f"the heads of K have {info.head_dim} elements, of V {info.v_head_dim}")
    pairs = [
        (_pages(k, page_size), _pages(v, page_size))
        for k, v in zip(info.buffers.k, info.buffers.v, strict=True)
    ]
    return Pool(_in_bands(len(pairs), info.head_num, info.head_dim, name, 2), pairs, False)


def _in_bands(num_layers: int, num_heads: int, head_size: int, dtype: str, sides: int) -> KVLayout:
    num_bands = min(NUM_BANDS, num_layers)
    ends = [num_layers * (band + 1) // num_bands for band in range(num_bands)]
    return KVLayout(
        tuple(
            LayerGroup(f"layers {begin}-{end - 1}", end - begin, num_heads, head_size, dtype, sides)
            for begin, end in zip([0, *ends], ends, strict=False)
        )
    )


def _pages(tensor: torch.Tensor, page_size: int) -> torch.Tensor:
    """View `[num_slots, num_heads, head_size]` by pages; slots behind the last whole one are left
    out.
    """
    num_pages = tensor.shape[0] // page_size
    return tensor[: num_pages * page_size].view(num_pages, page_size, *tensor.shape[1:])
