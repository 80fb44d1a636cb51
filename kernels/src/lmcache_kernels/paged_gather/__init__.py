"""`paged_gather`: from the pages of a KV cache into a contiguous chunk. The maths: `README.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from lmcache_kernels.paged_gather.reference import paged_gather_reference
from lmcache_kernels.paged_layout import check_slots, checked_layout

__all__ = ["paged_gather", "paged_gather_reference"]


def paged_gather(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slot_mapping: torch.Tensor, blob: torch.Tensor) -> None:
    """Fill `blob` with the K and V of the named slots, bit for bit. Does not wait for the device to finish.

    Args:
        keys: K of each layer, `[num_blocks, block_size, num_heads, head_size]`, all of one shape, dtype and device; the heads of a
            token are contiguous, blocks and tokens may be strided.
        values: V of each layer, as `keys`.
        slot_mapping: int64 `[num_tokens]`, `slot = block * block_size + offset`, in any order, on the pages' device or the CPU.
        blob: Filled: contiguous `[2, num_layers, num_tokens, num_heads * head_size]`, of the pages' dtype and device.

    Raises:
        KernelInputError: The tensors do not fit together, or a slot does not exist; `blob` is untouched.
    """
    layout = checked_layout(keys, values, slot_mapping, blob)
    check_slots(layout, once=False)
    if layout.slots.numel() == 0:
        return
    layout = dataclasses.replace(layout, slots=layout.slots.to(blob.device))
    if blob.device.type != "cuda":
        paged_gather_reference(layout)
        return
    from lmcache_kernels.paged_gather.kernel import launch

    with torch.cuda.device(blob.device):
        launch(layout)
