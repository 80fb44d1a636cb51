"""The Triton kernel of `paged_scatter`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmcache_kernels.paged_addressing import WORD_TYPES, launch_grid, pointer_table, tile_addresses
from lmcache_kernels.paged_layout import PagedLayout


@triton.jit  # type: ignore[untyped-decorator]
def paged_scatter_kernel(  # type: ignore[no-untyped-def]
    table_ptr, slots_ptr, blob_ptr, num_tokens, ROW_WORDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORD: tl.constexpr
):
    """Copy one tile from the chunk to the pages. Arguments as in `paged_addressing.tile_addresses`."""
    page_ptrs, blob_ptrs, mask = tile_addresses(table_ptr, slots_ptr, blob_ptr, num_tokens, ROW_WORDS, BLOCK_SIZE, WORD)
    tl.store(page_ptrs, tl.load(blob_ptrs, mask=mask), mask=mask)


def launch(layout: PagedLayout) -> None:
    """Write `layout.blob` into `layout.pages` on the current stream, in one launch for all layers.

    Args:
        layout: Checked, its slots too, none twice; at least one token; the slots on the pages' device.

    Raises:
        KernelInputError: The rows or layers are too large for one launch.
    """
    word_bytes = layout.word_bytes()
    grid = launch_grid(layout, word_bytes)
    paged_scatter_kernel[grid](
        pointer_table(layout, word_bytes),
        layout.slots,
        layout.blob.view(-1).view(torch.uint8),
        layout.slots.numel(),
        ROW_WORDS=layout.row_bytes // word_bytes,
        BLOCK_SIZE=layout.block_size,
        WORD=WORD_TYPES[word_bytes],
    )
