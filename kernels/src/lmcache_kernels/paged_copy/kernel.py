"""The Triton kernels of `paged_copy`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from lmcache_kernels.arithmetic import size_of, unspecialized
from lmcache_kernels.errors import KernelInputError

if TYPE_CHECKING:
    from lmcache_kernels.paged_copy import PagedCopy

# Not tuned on a GPU: 8 rows of 1 KiB, so that 128 threads copy eight words each.
TILE_TOKENS = tl.constexpr(8)
TILE_WORDS = tl.constexpr(128)
MAX_GRID_Y_Z = 65535
"""Largest second and third grid dimension. Source: CUDA C++ Programming Guide, "Compute
Capabilities".
"""
FREE = ("slots_ptr", "blob_ptr")
"""Pointers into the middle of tensors: Triton would compile again where they are aligned. How the
chunk is aligned, `ALIGNMENT_BYTES` says.
"""
VECTOR_BYTES = 16
"""Widest load of one thread. Source: PTX ISA, "Vectors": 128 bits."""


@triton.jit  # type: ignore[untyped-decorator]
def tile_addresses(  # type: ignore[no-untyped-def]
    table_ptr,
    slots_ptr,
    blob_ptr,
    sizes,
    ROW_WORDS: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    ALIGNMENT_BYTES: tl.constexpr,
):
    """Return the addresses of this program's tile in the pages and in the chunk.

    Program `(i, s, j)` has tokens `[i * TILE_TOKENS, …)` of page tensor `s` (a side of a layer),
    and words `[j * TILE_WORDS, …)` of each row.

    Args:
        table_ptr: `Pages.table`, int64 `[num page tensors, 5]`.
        slots_ptr: int64 `[num_tokens]`.
        blob_ptr: The chunk, `[num page tensors, num_rows, ROW_WORDS]` words, from its first token
            to copy on.
        sizes: Tokens to copy; tokens in the chunk, `num_rows` (`unspecialized`).
        ROW_WORDS: Words of a token.
        RUN_WORDS: How many of them are contiguous in the pages: all, or those of a head.
        ALIGNMENT_BYTES: Common divisor of all addresses, strides and runs: 1, 2, 4, 8 or 16. This
            is also the size of a word, up to 8.

    Returns:
        `(page_ptrs, blob_ptrs, mask)`, each `[TILE_TOKENS, TILE_WORDS]`.
    """
    NARROW: tl.constexpr = tl.uint8 if ALIGNMENT_BYTES == 1 else tl.int16
    WORD: tl.constexpr = (
        NARROW if ALIGNMENT_BYTES < 4 else (tl.int32 if ALIGNMENT_BYTES == 4 else tl.int64)
    )
    WORD_BYTES: tl.constexpr = 8 if ALIGNMENT_BYTES > 8 else ALIGNMENT_BYTES
    ALIGNMENT_WORDS: tl.constexpr = ALIGNMENT_BYTES // WORD_BYTES
    num_tokens, num_rows = size_of(sizes[0]), size_of(sizes[1])
    page = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    columns = tl.program_id(2).to(tl.int64) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    entry = table_ptr + page * 5
    base = tl.multiple_of(tl.load(entry).to(tl.pointer_type(WORD)), ALIGNMENT_BYTES)
    block_stride = tl.multiple_of(tl.load(entry + 1) // WORD_BYTES, ALIGNMENT_WORDS)
    token_stride = tl.multiple_of(tl.load(entry + 2) // WORD_BYTES, ALIGNMENT_WORDS)
    block_size = tl.load(entry + 4)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=0)
    rows = (slots // block_size) * block_stride + (slots % block_size) * token_stride
    if RUN_WORDS == ROW_WORDS:
        places = columns
    else:
        head_stride = tl.multiple_of(tl.load(entry + 3) // WORD_BYTES, ALIGNMENT_WORDS)
        places = (columns // RUN_WORDS) * head_stride + columns % RUN_WORDS
    page_ptrs = base + rows[:, None] + places[None, :]
    blob_rows = (page * num_rows + tokens) * ROW_WORDS
    blob_base = tl.multiple_of(blob_ptr.to(tl.pointer_type(WORD)), ALIGNMENT_BYTES)
    blob_ptrs = blob_base + blob_rows[:, None] + columns[None, :]
    mask = (tokens < num_tokens)[:, None] & (columns < ROW_WORDS)[None, :]
    return page_ptrs, blob_ptrs, mask


@triton.jit(do_not_specialize=FREE)  # type: ignore[untyped-decorator]
def paged_gather_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    slots_ptr,
    blob_ptr,
    sizes,
    ROW_WORDS: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    ALIGNMENT_BYTES: tl.constexpr,
):
    """Copy one tile into the chunk. Arguments as in `tile_addresses`."""
    page_ptrs, blob_ptrs, mask = tile_addresses(
        table_ptr, slots_ptr, blob_ptr, sizes, ROW_WORDS, RUN_WORDS, ALIGNMENT_BYTES
    )
    tl.store(blob_ptrs, tl.load(page_ptrs, mask=mask), mask=mask)


@triton.jit(do_not_specialize=FREE)  # type: ignore[untyped-decorator]
def paged_scatter_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    slots_ptr,
    blob_ptr,
    sizes,
    ROW_WORDS: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    ALIGNMENT_BYTES: tl.constexpr,
):
    """Copy one tile into the pages. Arguments as in `tile_addresses`."""
    page_ptrs, blob_ptrs, mask = tile_addresses(
        table_ptr, slots_ptr, blob_ptr, sizes, ROW_WORDS, RUN_WORDS, ALIGNMENT_BYTES
    )
    tl.store(page_ptrs, tl.load(blob_ptrs, mask=mask), mask=mask)


def launch(copy: PagedCopy, to_pages: bool) -> None:
    """Copy on the current stream, in one launch for all layers.

    Args:
        copy: At least one token.
        to_pages: Write the pages, not the chunk.

    Raises:
        KernelInputError: The rows or layers are too large for one launch.
    """
    num_tokens, num_pages = copy.slots.shape[0], len(copy.pages.tensors)
    row_words = copy.pages.row_bytes // copy.word_bytes
    grid = (
        triton.cdiv(num_tokens, TILE_TOKENS.value),
        num_pages,
        triton.cdiv(row_words, TILE_WORDS.value),
    )
    if max(grid[1:]) > MAX_GRID_Y_Z:
        raise KernelInputError(
            f"{num_pages} pages of rows of {copy.pages.row_bytes} bytes are too many for one launch"
        )
    kernel = paged_scatter_kernel if to_pages else paged_gather_kernel
    kernel[grid](
        copy.pages.table,
        copy.slots,
        copy.blob.view(-1).view(torch.uint8)[copy.first * copy.pages.row_bytes :],
        unspecialized(num_tokens, copy.blob.shape[2]),
        ROW_WORDS=row_words,
        RUN_WORDS=copy.pages.run_bytes // copy.word_bytes,
        ALIGNMENT_BYTES=math.gcd(VECTOR_BYTES, copy.alignment_bytes),
    )
