"""The torch references of `blend_select`, used on devices without a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

INFINITE = 0x7F800000
"""Bits of the float32 infinity: the bits of finite non-negative numbers are smaller."""


def blend_deviation_reference(
    fresh: torch.Tensor, retrieved: torch.Tensor, is_valid: torch.Tensor
) -> torch.Tensor:
    """Compute `blend_deviation`, on any device."""
    return (fresh.float() - retrieved.float()).square().sum(1).masked_fill(~is_valid, 0.0)


def ranks_of(deviation: torch.Tensor) -> torch.Tensor:
    """Return int32 ranks in the order of the deviations. All NaNs have the same, largest rank,
    since the sign of a NaN depends on the machine.
    """
    return (deviation.view(torch.int32) & 0x7FFFFFFF).clamp(max=INFINITE + 1)


def blend_select_reference(
    deviation: torch.Tensor,
    is_valid: torch.Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    num_tail_tokens: int,
) -> torch.Tensor:
    """Compute `blend_select`, on any device."""
    is_candidate = is_valid.clone()
    for start, end in pairwise(starts):
        is_candidate[max(start, end - num_tail_tokens) : end] = False
    ranks = ranks_of(deviation).masked_fill(~is_candidate, -1)
    selected = ~is_candidate | (ranks >= INFINITE)
    for (start, end), count in zip(pairwise(starts), counts, strict=True):
        order = ranks[start:end].argsort(descending=True, stable=True)
        selected[start + order[:count]] = True
    return selected
