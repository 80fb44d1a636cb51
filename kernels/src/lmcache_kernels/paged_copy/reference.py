"""The torch references of `paged_copy`, which also run on devices other than CPU and CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.pages import WORD_DTYPES

if TYPE_CHECKING:
    from lmcache_kernels.paged_copy import PagedCopy


def paged_gather_reference(copy: PagedCopy) -> None:
    """Fill the chunk: `blob[s, l, first + t] = pages[s, l][slots[t] // block_size, slots[t] %
    block_size]`.
    """
    blocks, offsets = copy.slots // copy.pages.block_size, copy.slots % copy.pages.block_size
    with torch.inference_mode():
        for page, chunk in _page_pairs(copy):
            chunk.copy_(page[blocks, offsets])


def paged_scatter_reference(copy: PagedCopy) -> None:
    """Fill the slots: `pages[s, l][slots[t] // block_size, slots[t] % block_size] = blob[s, l,
    first + t]`.
    """
    blocks, offsets = copy.slots // copy.pages.block_size, copy.slots % copy.pages.block_size
    with torch.inference_mode():
        for page, chunk in _page_pairs(copy):
            page[blocks, offsets] = chunk


def _page_pairs(copy: PagedCopy) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each page and its part of the chunk `[num_slots, num_heads, head_size]`, as words."""
    words = WORD_DTYPES[copy.pages.dtype.itemsize]
    tokens = slice(copy.first, copy.first + len(copy.slots))
    chunks = copy.blob.detach().view(words).flatten(0, 1)[:, tokens]
    for page, chunk in zip(copy.pages.tensors, chunks, strict=True):
        yield page.detach().view(words), chunk.unflatten(-1, page.shape[2:])
