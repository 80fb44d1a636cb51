"""`paged_scatter`: from a contiguous chunk into the pages of a KV cache. The maths: `README.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from lmcache_kernels.paged_layout import check_slots, checked_layout
from lmcache_kernels.paged_scatter.reference import paged_scatter_reference

__all__ = ["paged_scatter", "paged_scatter_reference"]


def paged_scatter(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slot_mapping: torch.Tensor, blob: torch.Tensor) -> None:
    """Write `blob` into the named slots of the pages, bit for bit; no other slot changes. Does not wait for the device to finish.

    Args:
        keys: Written: K of each layer, `[num_blocks, block_size, num_heads, head_size]`, all of one shape, dtype and device; the heads of a
            token are contiguous, blocks and tokens may be strided.
        values: Written: V of each layer, as `keys`.
        slot_mapping: int64 `[num_tokens]`, `slot = block * block_size + offset`, in any order, none twice, on the pages' device or the
            CPU.
        blob: Contiguous `[2, num_layers, num_tokens, num_heads * head_size]`, of the pages' dtype and device.

    Raises:
        KernelInputError: The tensors do not fit together, or a slot does not exist or occurs twice; the pages are untouched.
    """
    layout = checked_layout(keys, values, slot_mapping, blob)
    check_slots(layout, once=True)
    if layout.slots.numel() == 0:
        return
    layout = dataclasses.replace(layout, slots=layout.slots.to(blob.device))
    if blob.device.type != "cuda":
        paged_scatter_reference(layout)
        return
    from lmcache_kernels.paged_scatter.kernel import launch

    with torch.cuda.device(blob.device):
        launch(layout)
