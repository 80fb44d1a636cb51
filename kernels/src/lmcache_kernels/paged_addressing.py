"""Where the words of a tile of tokens lie: the addressing that the Triton kernels on paged KV caches share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.paged_layout import PagedLayout, row_strides

# Not tuned yet: 8 rows of 1 KiB, so that 128 threads copy eight words each.
TILE_TOKENS = tl.constexpr(8)
TILE_WORDS = tl.constexpr(128)
MAX_GRID_Y_Z = 65535
"""Largest second and third grid dimension. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

WORD_TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit  # type: ignore[untyped-decorator]
def tile_addresses(  # type: ignore[no-untyped-def]
    table_ptr, slots_ptr, blob_ptr, num_tokens, ROW_WORDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORD: tl.constexpr
):
    """Addresses of this program's tile in the pages and in the chunk.

    Program `(i, s, j)` has tokens `[i * TILE_TOKENS, …)` of pages `s` (K of every layer, then V), words `[j * TILE_WORDS, …)` of each row.

    Args:
        table_ptr: int64 `[2 * num_layers, 3]` on the device: address, block stride and token stride (words) of each of the pages.
        slots_ptr: int64 `[num_tokens]`.
        blob_ptr: The chunk, `[2 * num_layers, num_tokens, ROW_WORDS]` words.
        num_tokens: Tokens in the chunk.
        ROW_WORDS: Words in a row.
        BLOCK_SIZE: Tokens in a block.
        WORD: Integer type of a word.

    Returns:
        `(page_ptrs, blob_ptrs, mask)`, each `[TILE_TOKENS, TILE_WORDS]`.
    """
    page = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    columns = tl.program_id(2).to(tl.int64) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    base = tl.load(table_ptr + page * 3).to(tl.pointer_type(WORD))
    block_stride = tl.load(table_ptr + page * 3 + 1)
    token_stride = tl.load(table_ptr + page * 3 + 2)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=0)
    rows = (slots // BLOCK_SIZE) * block_stride + (slots % BLOCK_SIZE) * token_stride
    page_ptrs = base + rows[:, None] + columns[None, :]
    blob_rows = (page * num_tokens + tokens) * ROW_WORDS
    blob_ptrs = blob_ptr.to(tl.pointer_type(WORD)) + blob_rows[:, None] + columns[None, :]
    mask = (tokens < num_tokens)[:, None] & (columns < ROW_WORDS)[None, :]
    return page_ptrs, blob_ptrs, mask


def launch_grid(layout: PagedLayout, word_bytes: int) -> tuple[int, int, int]:
    """Programs that cover the chunk: tiles of tokens, pages, tiles of words.

    Raises:
        KernelInputError: A row or the number of layers is too large for one launch.
    """
    tile_tokens, tile_words = int(TILE_TOKENS.value), int(TILE_WORDS.value)
    num_words = layout.row_bytes // word_bytes
    grid = (-(-layout.slots.numel() // tile_tokens), len(layout.pages), -(-num_words // tile_words))
    if max(grid[1:]) > MAX_GRID_Y_Z:
        raise KernelInputError(f"{grid[1]} pages of rows of {layout.row_bytes} bytes are too many for one launch")
    return grid


def pointer_table(layout: PagedLayout, word_bytes: int) -> torch.Tensor:
    """The table that `tile_addresses` reads: int64 `[2 * num_layers, 3]` on the pages' device."""
    rows = [(page.data_ptr(), *(stride * page.element_size() // word_bytes for stride in row_strides(page))) for page in layout.pages]
    return torch.tensor(rows, dtype=torch.int64).to(layout.blob.device)
