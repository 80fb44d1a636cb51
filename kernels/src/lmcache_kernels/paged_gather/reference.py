"""The torch reference of `paged_gather`, which is also its implementation on devices other than
CPU and CUDA.
"""

from __future__ import annotations

import torch

from lmcache_kernels.paged_copy import PagedCopy


def paged_gather_reference(copy: PagedCopy) -> None:
    """Fill the chunk: `blob[s, l, t] = pages[s, l][slots[t] // block_size, slots[t] %
    block_size]`.
    """
    blocks, offsets = copy.slots // copy.pages.block_size, copy.slots % copy.pages.block_size
    with torch.inference_mode():
        for source, target in zip(copy.page_words(), copy.blob_words(), strict=True):
            target.copy_(source[blocks, offsets])
