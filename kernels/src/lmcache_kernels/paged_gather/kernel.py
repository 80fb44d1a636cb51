"""The Triton kernel of `paged_gather`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmcache_kernels.paged_addressing import launch_arguments, launch_grid, tile_addresses
from lmcache_kernels.paged_copy import PagedCopy


@triton.jit  # type: ignore[untyped-decorator]
def paged_gather_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    slots_ptr,
    blob_ptr,
    num_tokens,
    ROW_WORDS: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    ALIGNMENT_BYTES: tl.constexpr,
):
    """Copy one tile. Arguments as in `paged_addressing.tile_addresses`."""
    page_ptrs, blob_ptrs, mask = tile_addresses(
        table_ptr, slots_ptr, blob_ptr, num_tokens, ROW_WORDS, RUN_WORDS, ALIGNMENT_BYTES
    )
    tl.store(blob_ptrs, tl.load(page_ptrs, mask=mask), mask=mask)


def launch(copy: PagedCopy) -> None:
    """Fill the chunk on the current stream, in one launch for all layers.

    Args:
        copy: At least one token.

    Raises:
        KernelInputError: The rows or layers are too large for one launch.
    """
    paged_gather_kernel[launch_grid(copy)](
        copy.pages.table,
        copy.slots,
        copy.blob.view(-1).view(torch.uint8),
        copy.num_tokens,
        **launch_arguments(copy),
    )
