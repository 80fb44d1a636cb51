"""`paged_gather`: from the pages of a KV cache into a contiguous chunk. The maths: `README.md`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from lmcache_kernels.paged_copy import PagedCopy, checked_copy
from lmcache_kernels.paged_gather.host import paged_gather_host
from lmcache_kernels.paged_gather.reference import paged_gather_reference
from lmcache_kernels.pages import Pages

__all__ = ["paged_gather", "paged_gather_reference", "paged_gather_steps"]


def paged_gather(pages: Pages, slot_mapping: torch.Tensor, blob: torch.Tensor) -> None:
    """Fill `blob` with the KV of the named slots, bit for bit. Does not wait for the device to
    finish.

    Args:
        pages: Read.
        slot_mapping: int64 `[num_tokens]`, `slot = block * block_size + offset`, in any order, on
            the pages' device or the CPU.
        blob: Filled: contiguous `[num_sides, num_layers, num_tokens, num_heads * head_size]`, of
            the pages' dtype and device.

    Raises:
        KernelInputError: The tensors do not fit together, or a slot does not exist; `blob` is
            untouched.
    """
    deque(paged_gather_steps(checked_copy(pages, slot_mapping, blob, writes_pages=False)), maxlen=0)


def paged_gather_steps(copy: PagedCopy) -> Iterator[int]:
    """`paged_gather` of what has been checked, step by step: for callers who check several copies
    first, or follow the copy with more.

    Yields:
        How many of the pages, from the first, are in the chunk completely; on a device once, when
        all are on their way.
    """
    if copy.num_tokens == 0:
        return
    if copy.pages.device.type == "cpu":
        yield from paged_gather_host(copy)
        return
    if copy.pages.device.type != "cuda":
        paged_gather_reference(copy)
    else:
        from lmcache_kernels.paged_gather.kernel import launch

        with torch.cuda.device(copy.pages.device):
            launch(copy)
    yield len(copy.pages.tensors)
