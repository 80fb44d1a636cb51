"""CacheBlend: reuses KV that was computed in another context, and recomputes the tokens for which
that matters most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lmcache_kernels.blend_select import blend_deviation

from lmcache_core._typing import override
from lmcache_core.blend.interfaces import (
    BlendExecutor,
    BlendOutput,
    mask_to_indices,
    request_starts,
)
from lmcache_core.blend.selection import Candidates, SelectionPolicy, create_policy, with_the_rest

PositionalEncoder = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""Maps (positions `[num_tokens]`, Q, K) to rotated (Q, K); tokens are the first dimension."""
Move = Callable[[torch.Tensor], torch.Tensor]
"""Maps K of one layer at its original positions to K at the new ones; tokens are the first
dimension.
"""
Mover = Callable[[torch.Tensor, torch.Tensor], Move]
"""Maps (original positions, positions) of a batch to the function that moves its layers: the
reverse encoder and the encoder in one step.
"""


@dataclass(frozen=True, eq=False)
class _Layer:
    """The arguments of `BlendExecutor.blend`, under their names; `valid_mask` is boolean."""

    retrieved_k: torch.Tensor | None
    retrieved_v: torch.Tensor | None
    valid_mask: torch.Tensor
    original_positions: torch.Tensor
    fresh_q: torch.Tensor
    fresh_k: torch.Tensor
    fresh_v: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    token_dim: int

    def check(self, num_fresh: int | None, *, looks_at_values: bool) -> list[int]:
        """Check that lengths, shapes and positions match.

        Args:
            num_fresh: Number of tokens that are still computed; None: all.
            looks_at_values: Check values of positions, too, which waits for their device.

        Returns:
            First token of each request, followed by the number of tokens.

        Raises:
            ValueError: They do not match.
        """
        num_tokens, originals = len(self.valid_mask), self.original_positions
        if self.valid_mask.ndim != 1 or originals.shape != (num_tokens,):
            raise ValueError(
                f"valid_mask is {tuple(self.valid_mask.shape)}, original_positions"
                f" {tuple(originals.shape)}; both have one value a token"
            )
        starts = request_starts(self.query_start_loc, num_tokens)
        num_fresh = num_tokens if num_fresh is None else num_fresh
        self._check_fresh(num_fresh)
        if self.positions.shape != (num_fresh,):
            raise ValueError(
                f"positions is {tuple(self.positions.shape)}; expected one for each of"
                f" {num_fresh} tokens"
            )
        for name, positions in (("original_positions", originals), ("positions", self.positions)):
            if looks_at_values and len(positions) and int(positions.min()) < 0:
                raise ValueError(
                    f"{name} holds {int(positions.min())}; positions are counted from 0"
                )
        self._check_retrieved(num_tokens)
        return starts

    def _check_fresh(self, num_tokens: int) -> None:
        k, v, dim = self.fresh_k, self.fresh_v, self.token_dim
        if k.ndim < 2:
            raise ValueError(f"fresh_k is {tuple(k.shape)}; expected tokens and their channels")
        if not -k.ndim <= dim < k.ndim:
            raise ValueError(f"token_dim is {dim}; fresh_k has {k.ndim} dimensions")
        for name, side in (("fresh_q", self.fresh_q), ("fresh_k", k), ("fresh_v", v)):
            if side.ndim != k.ndim or side.shape[dim] != num_tokens:
                raise ValueError(
                    f"{name} is {tuple(side.shape)}; expected {num_tokens} tokens in dimension"
                    f" {dim}"
                )
        if k.shape != v.shape or k.dtype != v.dtype:
            raise ValueError(
                f"fresh_k is {tuple(k.shape)} of {k.dtype}, fresh_v {tuple(v.shape)} of {v.dtype}"
            )

    def _check_retrieved(self, num_tokens: int) -> None:
        if not self.valid_mask.any():
            return
        shape = list(self.fresh_k.shape)
        shape[self.token_dim] = num_tokens
        wanted = tuple(shape), self.fresh_k.dtype, self.fresh_k.device
        for name, side in (("retrieved_k", self.retrieved_k), ("retrieved_v", self.retrieved_v)):
            found = None if side is None else (tuple(side.shape), side.dtype, side.device)
            if found != wanted:
                told = "None" if found is None else "{} of {} on {}".format(*found)
                raise ValueError(
                    f"{name} is {told}; expected {'{} of {} on {}'.format(*wanted)}, as the fresh"
                )


@dataclass(frozen=True, eq=False)
class _Selected:
    """The selection of the check layer for a batch.

    Attributes:
        indices: Rows of the whole batch that are still computed, on its device.
        valid_mask: The mask of that layer: every later layer needs these rows.
        move: Moves K of all tokens of the batch.
    """

    indices: torch.Tensor
    valid_mask: torch.Tensor
    move: Move


class CacheBlendImpl(BlendExecutor):
    """Moves retrieved K to its new positions and recomputes the share of tokens that a policy
    selects.

    Layers before the policy's check layer are computed in full. Tokens are selected on that layer,
    and only these are computed after it. Tokens without valid KV and the last ones of each request
    are always among them. For one batch at a time: layer 0 begins a new one, and so may every layer
    up to the check layer. A refused call leaves the batch unchanged.

    An integration (see `BlendingModel` for an example):

    1. calls `CertificateFolder.reason_against`, and sets the rotation with
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
        recompute_ratio: Share of each request's valid tokens to recompute, 0 … 1.
        policy: Selects them; by default those that deviate most on layer 1.

    Raises:
        ValueError: The ratio is out of range.
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
        """Set the function that rotates Q and K at positions."""
        self._encode = positional_encoder

    def set_reverse_positional_encoder(self, reverse_positional_encoder: PositionalEncoder) -> None:
        """Set the function that undoes this, at the original positions of cached K."""
        self._decode = reverse_positional_encoder

    def set_mover(self, mover: Mover) -> None:
        """Set a function that does both in one step, which rounds once; it takes precedence over
        the encoders.
        """
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
        layer = _Layer(
            retrieved_k,
            retrieved_v,
            valid_mask.to(torch.bool),
            original_positions,
            fresh_q,
            fresh_k,
            fresh_v,
            positions,
            query_start_loc,
            token_dim,
        )
        num_fresh = None if selected is None else len(selected.indices)
        starts = layer.check(num_fresh, looks_at_values=layer_id <= self.policy.check_layer)
        if selected is not None:
            out = self._fill(selected, layer)
        elif layer_id == self.policy.check_layer and layer.valid_mask.any():
            selected, out = self._select(layer, starts)
        else:
            indices = torch.arange(len(positions), device=positions.device)
            out = BlendOutput(fresh_q, fresh_k, fresh_v, positions, indices, None)
        self._selected, self._next_layer = selected, layer_id + 1
        return out

    def _selected_before(self, layer_id: int) -> _Selected | None:
        if 0 <= layer_id <= self.policy.check_layer:
            return None
        if layer_id != self._next_layer:
            raise ValueError(
                f"layer {layer_id} does not follow layer {self._next_layer - 1}; layers come in"
                " order, from 0"
            )
        return self._selected

    def _select(self, layer: _Layer, starts: list[int]) -> tuple[_Selected, BlendOutput]:
        """Select the tokens that are still computed; on this layer all K and V are fresh."""
        device, dim, positions = layer.fresh_k.device, layer.token_dim, layer.positions
        is_valid, originals = layer.valid_mask.to(device), layer.original_positions.to(device)
        deviation = None
        if self.policy.needs_deviation:
            assert layer.retrieved_v is not None
            ours, theirs = (
                side.movedim(dim, 0).flatten(1).contiguous()
                for side in (layer.fresh_v, layer.retrieved_v)
            )
            deviation = blend_deviation(ours, theirs, is_valid)
        candidates = Candidates(layer.valid_mask, is_valid, originals, positions, starts, deviation)
        # A policy may leave out tokens that are always computed.
        is_selected = with_the_rest(self.policy.choose(candidates), candidates)
        indices = mask_to_indices(is_selected)
        counts = torch.cat([is_selected.new_zeros(1, dtype=torch.int64), is_selected.cumsum(0)])
        loc = layer.query_start_loc
        selected = _Selected(indices, layer.valid_mask.clone(), self._move_of(originals, positions))
        return selected, BlendOutput(
            layer.fresh_q.index_select(dim, indices),
            layer.fresh_k,
            layer.fresh_v,
            positions[indices],
            indices,
            counts[loc.to(device).long()].to(loc),
        )

    def _fill(self, selected: _Selected, layer: _Layer) -> BlendOutput:
        """Return the KV of all tokens: the retrieved and moved one, replaced by the fresh one where
        there is any.
        """
        if len(selected.valid_mask) != len(layer.valid_mask):
            raise ValueError(
                f"a layer has {len(layer.valid_mask)} tokens, that at which they were selected"
                f" {len(selected.valid_mask)}"
            )
        num_lost = int((selected.valid_mask & ~layer.valid_mask).sum())
        if num_lost:
            raise ValueError(
                f"a layer has no retrieved KV of {num_lost} tokens, though the layer at which"
                " tokens were selected had"
            )
        # Some token was valid when tokens were selected, so it is valid here.
        assert layer.retrieved_k is not None
        assert layer.retrieved_v is not None
        dim, positions = layer.token_dim, layer.positions
        keys = selected.move(layer.retrieved_k.movedim(dim, 0)).movedim(0, dim)
        k = keys.index_copy(dim, selected.indices, layer.fresh_k)
        v = layer.retrieved_v.index_copy(dim, selected.indices, layer.fresh_v)
        indices = torch.arange(len(positions), device=positions.device)
        return BlendOutput(layer.fresh_q, k, v, positions, indices, None)

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
