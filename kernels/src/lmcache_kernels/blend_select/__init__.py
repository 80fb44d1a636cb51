"""`blend_select`: the tokens of a batch whose KV deviates most from what was retrieved. The
maths: `README.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from lmcache_kernels.blend_select.reference import blend_deviation_reference, blend_select_reference
from lmcache_kernels.errors import KernelInputError

__all__ = ["blend_deviation", "blend_deviation_reference", "blend_select", "blend_select_reference"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def blend_deviation(
    fresh: torch.Tensor, retrieved: torch.Tensor, is_valid: torch.Tensor
) -> torch.Tensor:
    """How far retrieved rows are from the fresh. Does not wait for the device.

    Args:
        fresh: bfloat16, float16 or float32 `[num_tokens, channels]`, contiguous.
        retrieved: The same.
        is_valid: Booleans `[num_tokens]` on their device: rows that were retrieved.

    Returns:
        float32 `[num_tokens]`: squared distances, 0 where not valid.

    Raises:
        KernelInputError: The tensors do not fit together.
    """
    if fresh.dtype not in _DTYPES or fresh.ndim != 2 or not fresh.is_contiguous():
        raise KernelInputError(
            f"fresh rows are {fresh.dtype} {tuple(fresh.shape)}; expected contiguous floating-point"
            " [tokens, channels]"
        )
    if (
        retrieved.shape != fresh.shape
        or retrieved.dtype != fresh.dtype
        or retrieved.device != fresh.device
        or not retrieved.is_contiguous()
    ):
        raise KernelInputError(
            f"retrieved rows are {retrieved.dtype} {tuple(retrieved.shape)} on {retrieved.device};"
            " expected those of the fresh"
        )
    _check_mask(is_valid, len(fresh), fresh.device)
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
    """Choose tokens. Does not wait for the device.

    Args:
        deviation: float32 `[num_tokens]`, contiguous, none negative.
        is_valid: Booleans `[num_tokens]` on its device.
        starts: Where each request begins, and the number of tokens.
        counts: How many tokens of each request are chosen by their deviation, of those that are not
            chosen in any case; all where there are fewer. At most as many as the request has
            tokens.
        num_tail_tokens: Tokens at the end of each request that are chosen in any case, as those
            that are not valid, and those whose deviation is not finite.

    Returns:
        Booleans `[num_tokens]`.

    Raises:
        KernelInputError: The tensors or numbers do not fit together.
    """
    if deviation.dtype != torch.float32 or deviation.ndim != 1 or not deviation.is_contiguous():
        raise KernelInputError(
            f"deviation is {deviation.dtype} {tuple(deviation.shape)}; expected contiguous float32"
            " [tokens]"
        )
    _check_mask(is_valid, len(deviation), deviation.device)
    rises = (
        len(starts) > 0
        and starts[0] == 0
        and starts[-1] == len(deviation)
        and all(a <= b for a, b in pairwise(starts))
    )
    if not rises or len(counts) != len(starts) - 1:
        raise KernelInputError(
            f"starts are {list(starts)} with {len(counts)} counts; starts rise from 0 to"
            f" {len(deviation)}, a count a request"
        )
    if (
        any(
            not 0 <= count <= end - start
            for count, (start, end) in zip(counts, pairwise(starts), strict=True)
        )
        or num_tail_tokens < 0
    ):
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


def _check_mask(is_valid: torch.Tensor, num_tokens: int, device: torch.device) -> None:
    if (
        is_valid.dtype != torch.bool
        or is_valid.shape != (num_tokens,)
        or is_valid.device != device
        or not is_valid.is_contiguous()
    ):
        found = f"{is_valid.dtype} {tuple(is_valid.shape)} on {is_valid.device}"
        raise KernelInputError(
            f"is_valid is {found}; expected contiguous booleans [{num_tokens}] on {device}"
        )
