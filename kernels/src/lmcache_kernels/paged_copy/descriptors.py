"""A copy between pages and a chunk as runs of bytes, for copy engines, which need no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_kernels.paged_copy.slot_runs import Integers
from lmcache_kernels.pages import Pages

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Descriptors:
    """Runs of bytes that are contiguous in the pages and in the chunk, for all page tensors.

    Attributes:
        pages: Address of each run in the pages, `[num_runs]`.
        chunk: Its offset in the chunk.
        sizes: Its length.
    """

    pages: Addresses
    chunk: Addresses
    sizes: Addresses


def descriptors_of(
    pages: Pages, slots: Integers, first: int, num_tokens: int
) -> Descriptors | None:
    """Describe a copy of some of a chunk's tokens; None if tokens are not contiguous in the pages.

    Args:
        slots: At least one, all valid.
        first: The chunk's token that belongs to the first slot.
        num_tokens: Tokens in the chunk.
    """
    if not pages.are_rows_adjacent:
        return None
    size, row = pages.block_size, pages.row_bytes
    breaks = np.flatnonzero((slots[1:] != slots[:-1] + 1) | (slots[1:] % size == 0)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(starts, append=len(slots))
    blocks, places = np.divmod(slots[starts], size)
    begins, strides = pages.rows[:, 0], pages.rows[:, 1]
    tensors = np.arange(len(begins))[:, None] * num_tokens
    return Descriptors(
        (begins[:, None] + strides[:, None] * blocks + places * row).reshape(-1).view(np.uint64),
        ((tensors + first + starts) * row).reshape(-1).view(np.uint64),
        np.tile(lengths * row, len(begins)).view(np.uint64),
    )
