"""`paged_scatter`: from a contiguous chunk into the pages of a KV cache. The maths: `README.md`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from lmcache_kernels.paged_copy import PagedCopy, checked_copy
from lmcache_kernels.paged_scatter.host import paged_scatter_host
from lmcache_kernels.paged_scatter.reference import paged_scatter_reference
from lmcache_kernels.pages import Pages

__all__ = ["paged_scatter", "paged_scatter_reference", "paged_scatter_steps"]


def paged_scatter(pages: Pages, slot_mapping: torch.Tensor, blob: torch.Tensor) -> None:
    """Write `blob` into the named slots of the pages, bit for bit; no other slot changes. Does not
    wait for the device to finish.

    Args:
        pages: Written.
        slot_mapping: int64 `[num_tokens]`, `slot = block * block_size + offset`, in any order, none
            twice, on the pages' device or the CPU.
        blob: Contiguous `[num_sides, num_layers, num_tokens, num_heads * head_size]`, of the pages'
            dtype and device.

    Raises:
        KernelInputError: The tensors do not fit together, or a slot does not exist or occurs twice;
            the pages are untouched.
    """
    deque(paged_scatter_steps(checked_copy(pages, slot_mapping, blob, writes_pages=True)), maxlen=0)


def paged_scatter_steps(copy: PagedCopy) -> Iterator[int]:
    """`paged_scatter` of what has been checked, step by step: for callers who check several copies
    first, or follow the copy with more.

    Yields:
        How many of the pages, from the first, are filled from the chunk; on a device once, when all
        are on their way.
    """
    if copy.num_tokens == 0:
        return
    if copy.pages.device.type == "cpu":
        yield from paged_scatter_host(copy)
        return
    if copy.pages.device.type != "cuda":
        paged_scatter_reference(copy)
    else:
        from lmcache_kernels.paged_scatter.kernel import launch

        with torch.cuda.device(copy.pages.device):
            launch(copy)
    yield len(copy.pages.tensors)
