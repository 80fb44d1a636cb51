"""The torch references of `blend_select`; what runs where there is no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def blend_deviation_reference(fresh: torch.Tensor, retrieved: torch.Tensor, is_valid: torch.Tensor) -> torch.Tensor:
    """As `blend_deviation`, anywhere."""
    return (fresh.float() - retrieved.float()).square().sum(1).masked_fill(~is_valid, 0.0)


def blend_select_reference(
    deviation: torch.Tensor, is_valid: torch.Tensor, starts: Sequence[int], counts: Sequence[int], num_tail_tokens: int
) -> torch.Tensor:
    """As `blend_select`, anywhere."""
    selected = ~is_valid
    bits = deviation.view(torch.int32).masked_fill(selected, -1)
    for (start, end), count in zip(pairwise(starts), counts, strict=True):
        order = bits[start:end].argsort(descending=True, stable=True)
        selected[start + order[:count]] = True
        selected[max(start, end - num_tail_tokens) : end] = True
    return selected
