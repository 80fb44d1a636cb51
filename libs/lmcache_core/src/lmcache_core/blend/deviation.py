"""How far retrieved KV is from the fresh, token by token."""

from __future__ import annotations

import torch


def deviation_of(
    fresh_k: torch.Tensor, moved_k: torch.Tensor, fresh_v: torch.Tensor, retrieved_v: torch.Tensor, is_valid: torch.Tensor, token_dim: int
) -> torch.Tensor:
    """Squared distance of K and of V, each as a share of what the fresh ones measure on average.

    Args:
        fresh_k: K of this prompt.
        moved_k: Retrieved K at the same positions.
        fresh_v: V of this prompt.
        retrieved_v: Retrieved V.
        is_valid: Booleans `[num_tokens]`, on their device.
        token_dim: Which dimension counts tokens.

    Returns:
        float32 `[num_tokens]`, 0 where not valid.
    """
    total = torch.zeros(len(is_valid), dtype=torch.float32, device=fresh_k.device)
    for fresh, other in ((fresh_k, moved_k), (fresh_v, retrieved_v)):
        mine = fresh.movedim(token_dim, 0).flatten(1).float()
        distance = (mine - other.movedim(token_dim, 0).flatten(1).float()).square().sum(1)
        total += distance / mine.square().sum(1).mean().clamp_min(torch.finfo(torch.float32).tiny)
    return total.masked_fill(~is_valid, 0.0)
