"""CacheBlend: KV that was computed without what stands before it now, mended where that matters most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmcache_core.blend.batch import Batch, Layer, Pair
from lmcache_core.blend.deviation import deviation_of
from lmcache_core.blend.indices import create_index, indices_to_mask, mask_to_indices
from lmcache_core.blend.interfaces import BlendExecutor, BlendOutput
from lmcache_core.blend.selection import MIN_RECOMPUTED_TAIL_TOKENS, Candidates, SelectionPolicy, create_policy

__all__ = ["CacheBlendImpl", "PositionalEncoder", "create_index", "indices_to_mask", "mask_to_indices"]

PositionalEncoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(positions `[num_tokens]`, Q, K) to (Q, K), rotated; tokens are the first dimension."""
Mover = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(K, original positions, positions) to K: the reverse encoder and the encoder in one step."""


@dataclass(frozen=True, eq=False)
class _Selected:
    """What the check layer chose of a batch.

    Attributes:
        indices: Rows of the whole batch that are still computed, on its device.
        positions: Positions of all tokens of the batch.
    """

    indices: torch.Tensor
    positions: torch.Tensor


class CacheBlendImpl(BlendExecutor):
    """Moves retrieved K to its new positions and computes anew the share of tokens that a policy selects.

    Layers before the policy's check layer are computed in full. On it tokens are selected; behind it only these are computed. Tokens
    without valid KV and the last of each request are always among them. For one batch at a time: layer 0 begins a new one.

    Args:
        recompute_ratio: Share of each request's valid tokens that are computed anew, 0 … 1.
        policy: How they are selected; by default those that deviate most on layer 1.

    Raises:
        ValueError: The ratio is no share.
    """

    def __init__(self, recompute_ratio: float, policy: SelectionPolicy | None = None) -> None:
        by_default = create_policy("deviation", recompute_ratio)
        self.policy = policy or by_default
        self._encode: PositionalEncoder | None = None
        self._decode: PositionalEncoder | None = None
        self._move: Mover | None = None
        self._selected: _Selected | None = None
        self._next_layer = 0

    def set_positional_encoder(self, positional_encoder: PositionalEncoder) -> None:
        """Set how Q and K are rotated at positions."""
        self._encode = positional_encoder

    def set_reverse_positional_encoder(self, reverse_positional_encoder: PositionalEncoder) -> None:
        """Set how that is undone, at the original positions of cached K."""
        self._decode = reverse_positional_encoder

    def set_mover(self, mover: Mover) -> None:
        """Set both in one step, which rounds once; it goes before the two encoders."""
        self._move = mover

    def blend(
        self,
        layer_id: int,
        retrieved_k: torch.Tensor | None,
        retrieved_v: torch.Tensor | None,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        fresh_q: torch.Tensor,
        fresh_k: torch.Tensor,
        fresh_v: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        token_dim: int,
    ) -> BlendOutput:
        """See `BlendExecutor.blend`.

        Raises:
            ValueError: Lengths, shapes or positions do not fit together; a layer came out of order; or K would have to be moved and no
                positional encoders were set.
        """
        self._enter(layer_id)
        batch = Batch.checked(valid_mask, original_positions, query_start_loc, looks_at_values=layer_id == 0)
        fresh = Layer(fresh_q, fresh_k, fresh_v, token_dim)
        fresh.check(positions, batch.num_tokens if self._selected is None else len(self._selected.indices), looks_at_values=layer_id == 0)
        retrieved = fresh.checked_retrieved(retrieved_k, retrieved_v, batch)
        if self._selected is not None:
            return self._fill(self._selected, batch, fresh, retrieved, positions)
        if layer_id == self.policy.check_layer and retrieved is not None:
            return self._select(batch, fresh, retrieved, positions)
        return BlendOutput(fresh_q, fresh_k, fresh_v, positions, torch.arange(batch.num_tokens, device=positions.device), None)

    def _enter(self, layer_id: int) -> None:
        if layer_id not in (0, self._next_layer):
            raise ValueError(f"layer {layer_id} does not follow layer {self._next_layer - 1}; layers come in order, from 0")
        if layer_id == 0:
            self._selected = None
        self._next_layer = layer_id + 1

    def _select(self, batch: Batch, fresh: Layer, retrieved: Pair, positions: torch.Tensor) -> BlendOutput:
        """Choose the tokens that are still computed; of this layer all K and V are fresh."""
        device = fresh.k.device
        is_valid, originals = batch.valid_mask.to(device), batch.original_positions.to(device)
        deviation = None
        if self.policy.needs_deviation:
            moved = self._moved(retrieved[0], originals, positions, fresh.token_dim)
            deviation = deviation_of(fresh.k, moved, fresh.v, retrieved[1], is_valid, fresh.token_dim)
        selected = ~is_valid
        for start, end in batch.requests():
            part = Candidates(is_valid[start:end], originals[start:end], None if deviation is None else deviation[start:end])
            selected[start:end] |= self.policy.choose(part)
            selected[max(start, end - MIN_RECOMPUTED_TAIL_TOKENS) : end] = True
        indices = mask_to_indices(selected)
        counts = torch.cat([selected.new_zeros(1, dtype=torch.int64), selected.cumsum(0)])
        starts = counts[batch.query_start_loc.to(device)].to(batch.query_start_loc)
        self._selected = _Selected(indices, positions)
        return BlendOutput(fresh.taken(fresh.q, indices), fresh.k, fresh.v, positions[indices], indices, starts)

    def _fill(self, selected: _Selected, batch: Batch, fresh: Layer, retrieved: Pair | None, positions: torch.Tensor) -> BlendOutput:
        """All tokens' KV: the retrieved, moved, and the fresh in its place where there is any."""
        if retrieved is None:
            raise ValueError("a layer has no retrieved KV, though the layer at which tokens were selected had")
        keys = self._moved(retrieved[0], batch.original_positions.to(fresh.k.device), selected.positions, fresh.token_dim)
        k = keys.index_copy(fresh.token_dim, selected.indices, fresh.k)
        v = retrieved[1].index_copy(fresh.token_dim, selected.indices, fresh.v)
        return BlendOutput(fresh.q, k, v, positions, torch.arange(len(positions), device=positions.device), None)

    def _moved(self, k: torch.Tensor, original_positions: torch.Tensor, positions: torch.Tensor, token_dim: int) -> torch.Tensor:
        first = k.movedim(token_dim, 0)
        if self._move is not None:
            moved = self._move(first, original_positions, positions)
        elif self._encode is not None and self._decode is not None:
            _, bare = self._decode(original_positions, first, first)
            _, moved = self._encode(positions, bare, bare)
        else:
            raise ValueError("retrieved K cannot be moved: set the positional encoder and the reverse one (or a mover) first")
        return moved.movedim(0, token_dim)
