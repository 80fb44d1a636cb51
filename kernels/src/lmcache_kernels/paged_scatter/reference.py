"""The torch reference of `paged_scatter`, which is also its implementation on devices other than
CPU and CUDA.
"""

from __future__ import annotations

import torch

from lmcache_kernels.paged_copy import PagedCopy


def paged_scatter_reference(copy: PagedCopy) -> None:
    """Fill the slots of the pages: `pages[s, l][slots[t] // block_size, slots[t] % block_size] =
    blob[s, l, t]`.
    """
    blocks, offsets = copy.slots // copy.pages.block_size, copy.slots % copy.pages.block_size
    with torch.inference_mode():
        for target, source in zip(copy.page_words(), copy.blob_words(), strict=True):
            target[blocks, offsets] = source
