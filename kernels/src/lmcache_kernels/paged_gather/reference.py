"""The torch reference of `paged_gather`, which is also its implementation on every device but CUDA."""

from __future__ import annotations

import torch

from lmcache_kernels.paged_layout import PagedLayout


def paged_gather_reference(layout: PagedLayout) -> None:
    """Fill `layout.blob`: `blob[s, l, t] = pages[s, l][slots[t] // block_size, slots[t] % block_size]`.

    Args:
        layout: Checked, its slots too; the slots on the pages' device.
    """
    with torch.inference_mode():
        for source, target in zip(layout.page_words(), layout.blob_words(), strict=True):
            num_blocks, block_size, row_words = source.shape
            if num_blocks == 1 or block_size == 1 or source.stride(0) == block_size * source.stride(1):
                torch.index_select(source.view(num_blocks * block_size, row_words), 0, layout.slots, out=target)
            else:
                target.copy_(source[layout.slots // block_size, layout.slots % block_size])
