"""CacheBlend: KV that was computed without what stands before it now, mended where that matters
most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lmcache_kernels.blend_select import blend_deviation

from lmcache_core._typing import override
from lmcache_core.blend.batch import Batch, Layer, Pair
from lmcache_core.blend.indices import create_index, indices_to_mask, mask_to_indices
from lmcache_core.blend.interfaces import BlendExecutor, BlendOutput
from lmcache_core.blend.selection import Candidates, SelectionPolicy, create_policy, with_the_rest

__all__ = [
    "CacheBlendImpl",
    "PositionalEncoder",
    "create_index",
    "indices_to_mask",
    "mask_to_indices",
]

PositionalEncoder = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""(positions `[num_tokens]`, Q, K) to (Q, K), rotated; tokens are the first dimension."""
Move = Callable[[torch.Tensor], torch.Tensor]
"""K of one layer at its original positions to K at the new ones; tokens are the first dimension."""
Mover = Callable[[torch.Tensor, torch.Tensor], Move]
"""(original positions, positions) of a batch to what moves its layers: the reverse encoder and
the encoder in one step.
"""


@dataclass(frozen=True, eq=False)
class _Selected:
    """What the check layer chose of a batch.

    Attributes:
        indices: Rows of the whole batch that are still computed, on its device.
        valid_mask: As it was there: every layer after it needs these rows.
        move: Moves K of all tokens of the batch.
    """

    indices: torch.Tensor
    valid_mask: torch.Tensor
    move: Move


class CacheBlendImpl(BlendExecutor):
    """Moves retrieved K to its new positions and recomputes the share of tokens that a policy
    selects.

    Layers before the policy's check layer are computed in full. On it tokens are selected; after
    it only these are computed. Tokens without valid KV and the last of each request are always
    among them. For one batch at a time: layer 0 begins a new one, and so may every layer up to the
    check layer. What is refused leaves the batch as it was.

    An integration (`BlendingModel` is the model to follow):

    1. asks `CertificateFolder.reason_against`, and tells the executor the rotation with
       `set_mover`, or with `set_positional_encoder` and `set_reverse_positional_encoder`;
    2. calls `task = retriever.new_request(input_tokens, query_start_loc)`, which looks up prefixes
       within the tiers' deadlines and fetches in the background;
    3. for each layer from 0 computes rotated Q, K, V of the remaining tokens, takes
       `found = task.result(layer_id)` and calls `blend` with its `k`, `v`, `valid_mask` and
       `original_positions`; the `query_start_loc` passed there stays that of all tokens;
    4. if the output's `query_start_loc` is not None, keeps the rows `local_indices` of the hidden
       state and uses the output's `positions` and `query_start_loc` for them;
    5. attends the output's `q` over its `k` and `v`: each query sees keys up to its own position,
       not its row.

    Args:
        recompute_ratio: Share of each request's valid tokens that are recomputed, 0 … 1.
        policy: How they are selected; by default those that deviate most on layer 1.

    Raises:
        ValueError: The ratio is no share.
    """

    def __init__(self, recompute_ratio: float, policy: SelectionPolicy | None = None) -> None:
        by_default = create_policy("deviation", recompute_ratio)
        self.policy = policy or by_default
        self._encode: PositionalEncoder | None = None
        self._decode: PositionalEncoder | None = None
        self._mover: Mover | None = None
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
        self._mover = mover

    @override
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
        """Raises:
        ValueError: Lengths, shapes or positions do not fit together; a layer came out of order;
            or K would have to be moved and no positional encoders were set.
        """
        selected = self._selected_before(layer_id)
        is_whole = layer_id <= self.policy.check_layer
        batch = Batch.checked(
            valid_mask, original_positions, query_start_loc, looks_at_values=is_whole
        )
        fresh = Layer(fresh_q, fresh_k, fresh_v, token_dim)
        fresh.check(
            positions,
            batch.num_tokens if selected is None else len(selected.indices),
            looks_at_values=is_whole,
        )
        retrieved = fresh.checked_retrieved(retrieved_k, retrieved_v, batch)
        if selected is not None:
            out = self._fill(selected, batch, fresh, retrieved, positions)
        elif layer_id == self.policy.check_layer and retrieved is not None:
            selected, out = self._select(batch, fresh, retrieved, positions)
        else:
            out = BlendOutput(
                fresh_q,
                fresh_k,
                fresh_v,
                positions,
                torch.arange(batch.num_tokens, device=positions.device),
                None,
            )
        self._selected, self._next_layer = selected, layer_id + 1
        return out

    def _selected_before(self, layer_id: int) -> _Selected | None:
        """Return what was chosen on an earlier layer of this batch."""
        if 0 <= layer_id <= self.policy.check_layer:
            return None
        if layer_id != self._next_layer:
            raise ValueError(
                f"layer {layer_id} does not follow layer {self._next_layer - 1}; layers come in"
                " order, from 0"
            )
        return self._selected

    def _select(
        self, batch: Batch, fresh: Layer, retrieved: Pair, positions: torch.Tensor
    ) -> tuple[_Selected, BlendOutput]:
        """Choose the tokens that are still computed; of this layer all K and V are fresh."""
        device = fresh.k.device
        is_valid, originals = batch.valid_mask.to(device), batch.original_positions.to(device)
        deviation = None
        if self.policy.needs_deviation:
            ours, theirs = (
                side.movedim(fresh.token_dim, 0).flatten(1).contiguous()
                for side in (fresh.v, retrieved[1])
            )
            deviation = blend_deviation(ours, theirs, is_valid)
        candidates = Candidates(
            batch.valid_mask, is_valid, originals, positions, batch.starts, deviation
        )
        is_selected = with_the_rest(
            self.policy.choose(candidates), candidates
        )  # which a foreign policy may have left out
        indices = mask_to_indices(is_selected)
        counts = torch.cat([is_selected.new_zeros(1, dtype=torch.int64), is_selected.cumsum(0)])
        starts = counts[batch.query_start_loc.to(device).long()].to(batch.query_start_loc)
        selected = _Selected(indices, batch.valid_mask.clone(), self._move_of(originals, positions))
        return selected, BlendOutput(
            fresh.taken(fresh.q, indices), fresh.k, fresh.v, positions[indices], indices, starts
        )

    def _fill(
        self,
        selected: _Selected,
        batch: Batch,
        fresh: Layer,
        retrieved: Pair | None,
        positions: torch.Tensor,
    ) -> BlendOutput:
        """Return all tokens' KV: the retrieved, moved, and the fresh in its place where there is
        any.
        """
        if len(selected.valid_mask) != batch.num_tokens:
            raise ValueError(
                f"a layer has {batch.num_tokens} tokens, that at which they were selected"
                f" {len(selected.valid_mask)}"
            )
        num_lost = int((selected.valid_mask & ~batch.valid_mask).sum())
        if retrieved is None or num_lost:
            raise ValueError(
                f"a layer has no retrieved KV of {num_lost} tokens, though the layer at which"
                " tokens were selected had"
            )
        keys = selected.move(retrieved[0].movedim(fresh.token_dim, 0)).movedim(0, fresh.token_dim)
        k = keys.index_copy(fresh.token_dim, selected.indices, fresh.k)
        v = retrieved[1].index_copy(fresh.token_dim, selected.indices, fresh.v)
        return BlendOutput(
            fresh.q, k, v, positions, torch.arange(len(positions), device=positions.device), None
        )

    def _move_of(self, original_positions: torch.Tensor, positions: torch.Tensor) -> Move:
        if self._mover is not None:
            return self._mover(original_positions, positions)
        if self._encode is None or self._decode is None:
            raise ValueError(
                "retrieved K cannot be moved: set the positional encoder and the reverse one (or a"
                " mover) first"
            )
        encode, decode = self._encode, self._decode

        def move(k: torch.Tensor) -> torch.Tensor:
            _, bare = decode(original_positions, k, k)
            return encode(positions, bare, bare)[1]

        return move
