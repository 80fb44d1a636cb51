"""Which tokens at the front of a sequence are not asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def num_masked_tokens(mask: torch.Tensor | None, num_tokens: int, chunk_size: int) -> int:
    """Number of Falses at the front of the mask.

    Args:
        mask: Booleans, shape `[num_tokens]`, or None for no Falses.
        num_tokens: Length of the sequence.
        chunk_size: Tokens in a full chunk.

    Raises:
        ValueError: Wrong length or dtype, a False behind a True, or the number of Falses is no
            multiple of the chunk size.
    """
    if mask is None:
        return 0
    flags = np.asarray(mask)
    if flags.shape != (num_tokens,) or flags.dtype != np.bool_:
        raise ValueError(
            f"the mask must be {num_tokens} booleans, not shape {flags.shape} of {flags.dtype}"
        )
    num_false = num_tokens - int(np.count_nonzero(flags))
    if flags[:num_false].any():
        raise ValueError("the mask must be Falses followed by Trues (FFF…TTT)")
    if num_false % chunk_size:
        raise ValueError(
            f"the number of Falses in the mask ({num_false}) is not a multiple of the chunk size"
            f" ({chunk_size})"
        )
    return num_false
