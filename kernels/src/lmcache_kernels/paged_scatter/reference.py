"""The torch reference of `paged_scatter`, which is also its implementation on every device but CUDA."""

from __future__ import annotations

import torch

from lmcache_kernels.paged_layout import PagedLayout


def paged_scatter_reference(layout: PagedLayout) -> None:
    """Fill the slots of `layout.pages`: `pages[s, l][slots[t] // block_size, slots[t] % block_size] = blob[s, l, t]`.

    Args:
        layout: Checked, its slots too, none twice; the slots on the pages' device.
    """
    with torch.inference_mode():
        for target, source in zip(layout.page_words(), layout.blob_words(), strict=True):
            num_blocks, block_size, row_words = target.shape
            if num_blocks == 1 or block_size == 1 or target.stride(0) == block_size * target.stride(1):
                target.view(num_blocks * block_size, row_words).index_copy_(0, layout.slots, source)
            else:
                target[layout.slots // block_size, layout.slots % block_size] = source
