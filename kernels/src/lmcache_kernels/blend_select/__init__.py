"""`blend_select`: selects the tokens of a batch whose KV deviates most from what was retrieved. The
maths: `README.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from lmcache_kernels.blend_select.reference import blend_deviation_reference, blend_select_reference
from lmcache_kernels.checks import FLOATS, check_tensor
from lmcache_kernels.errors import KernelInputError

__all__ = ["blend_deviation", "blend_deviation_reference", "blend_select", "blend_select_reference"]


def blend_deviation(
    fresh: torch.Tensor, retrieved: torch.Tensor, is_valid: torch.Tensor
) -> torch.Tensor:
    """Return the distance of retrieved rows from fresh ones. Does not wait for the device.

    Args:
        fresh: bfloat16, float16 or float32 `[num_tokens, channels]`, contiguous.
        retrieved: Same shape and dtype.
        is_valid: Booleans `[num_tokens]` on the same device: rows that were retrieved.

    Returns:
        float32 `[num_tokens]`: squared distances, 0 where not valid.

    Raises:
        KernelInputError: The tensors do not match.
    """
    check_tensor("fresh rows", fresh, FLOATS, (None, None), fresh.device)
    check_tensor("retrieved rows", retrieved, (fresh.dtype,), fresh.shape, fresh.device)
    check_tensor("is_valid", is_valid, (torch.bool,), (len(fresh),), fresh.device)
    if fresh.device.type != "cuda":
        return blend_deviation_reference(fresh, retrieved, is_valid)
    from lmcache_kernels.blend_select.kernel import launch_deviation

    deviation = torch.empty(len(fresh), dtype=torch.float32, device=fresh.device)
    launch_deviation(fresh, retrieved, is_valid, deviation)
    return deviation


def blend_select(
    deviation: torch.Tensor,
    is_valid: torch.Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    num_tail_tokens: int,
) -> torch.Tensor:
    """Select tokens. Does not wait for the device.

    Args:
        deviation: float32 `[num_tokens]`, contiguous, not negative.
        is_valid: Booleans `[num_tokens]` on the same device.
        starts: First token of each request, followed by the number of tokens.
        counts: Number of tokens of each request to select by deviation, in addition to those that
            are always selected; all if there are fewer. At most the number of tokens in the
            request.
        num_tail_tokens: Number of tokens at the end of each request that are always selected, like
            those that are not valid or whose deviation is not finite.

    Returns:
        Booleans `[num_tokens]`.

    Raises:
        KernelInputError: The tensors or numbers do not match.
    """
    check_tensor("deviation", deviation, (torch.float32,), (None,), deviation.device)
    check_tensor("is_valid", is_valid, (torch.bool,), (len(deviation),), deviation.device)
    lengths = [end - start for start, end in pairwise(starts)]
    rises = (
        bool(starts)
        and (starts[0], starts[-1]) == (0, len(deviation))
        and min(lengths, default=0) >= 0
    )
    if not rises or len(counts) != len(lengths):
        raise KernelInputError(
            f"starts are {list(starts)} with {len(counts)} counts; starts must rise from 0 to"
            f" {len(deviation)}, with one count per request"
        )
    fit = all(0 <= count <= length for count, length in zip(counts, lengths, strict=True))
    if not fit or num_tail_tokens < 0:
        raise KernelInputError(
            f"counts are {list(counts)} of requests that begin at {list(starts)}, {num_tail_tokens}"
            " at their ends"
        )
    if deviation.device.type != "cuda":
        return blend_select_reference(deviation, is_valid, starts, counts, num_tail_tokens)
    from lmcache_kernels.blend_select.kernel import launch_select

    selected = torch.empty(len(deviation), dtype=torch.bool, device=deviation.device)
    launch_select(deviation, is_valid, starts, counts, num_tail_tokens, selected)
    return selected
