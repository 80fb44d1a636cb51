"""CacheBlend: KV that was computed without what stands before it now, mended where that matters
most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from lmcache_kernels.blend_select import blend_deviation

from lmcache_core._typing import override
from lmcache_core.blend.interfaces import BlendExecutor, BlendOutput, mask_to_indices
from lmcache_core.blend.selection import Candidates, SelectionPolicy, create_policy, with_the_rest

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


_Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """The tokens of a batch and where their KV comes from.

    Attributes:
        valid_mask: Booleans on the CPU, `[num_tokens]`.
        original_positions: int64 `[num_tokens]`.
        query_start_loc: `[num_requests + 1]`, as it was given.
        starts: The same as plain numbers.
    """

    valid_mask: torch.Tensor
    original_positions: torch.Tensor
    query_start_loc: torch.Tensor
    starts: tuple[int, ...]

    @classmethod
    def checked(
        cls,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        looks_at_values: bool,
    ) -> _Batch:
        """Check lengths, and values too if told to.

        Raises:
            ValueError: They do not describe one batch.
        """
        num_tokens = len(valid_mask)
        if valid_mask.ndim != 1 or original_positions.shape != (num_tokens,):
            shapes = (
                f"valid_mask is {tuple(valid_mask.shape)}, original_positions"
                f" {tuple(original_positions.shape)}"
            )
            raise ValueError(f"{shapes}; both have one value a token")
        starts = tuple(query_start_loc.tolist()) if query_start_loc.ndim == 1 else ()
        if (
            len(starts) < 1
            or starts[0] != 0
            or starts[-1] != num_tokens
            or any(a > b for a, b in pairwise(starts))
        ):
            raise ValueError(
                f"query_start_loc is {query_start_loc.tolist()}; it must rise from 0 to the number"
                f" of tokens, {num_tokens}"
            )
        if looks_at_values and num_tokens and int(original_positions.min()) < 0:
            raise ValueError(
                f"original_positions holds {int(original_positions.min())}; positions are counted"
                " from 0"
            )
        return cls(valid_mask.to(torch.bool), original_positions, query_start_loc, starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return len(self.valid_mask)


@dataclass(frozen=True, eq=False)
class _Layer:
    """Fresh Q, K and V of the tokens that are still computed.

    Attributes:
        q: Any number of heads.
        k: As `v`.
        v: As `k`.
        token_dim: Which dimension of them counts tokens.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    token_dim: int

    def check(self, positions: torch.Tensor, num_tokens: int, *, looks_at_values: bool) -> None:
        """Check that there are so many tokens.

        Raises:
            ValueError: There are not, or K and V differ in shape or dtype.
        """
        if self.k.ndim < 2:
            raise ValueError(
                f"fresh_k is {tuple(self.k.shape)}; expected tokens and their channels"
            )
        if not -self.k.ndim <= self.token_dim < self.k.ndim:
            raise ValueError(f"token_dim is {self.token_dim}; fresh_k has {self.k.ndim} dimensions")
        for name, side in (("fresh_q", self.q), ("fresh_k", self.k), ("fresh_v", self.v)):
            if side.ndim != self.k.ndim or side.shape[self.token_dim] != num_tokens:
                raise ValueError(
                    f"{name} is {tuple(side.shape)}; expected {num_tokens} tokens in dimension"
                    f" {self.token_dim}"
                )
        if self.k.shape != self.v.shape or self.k.dtype != self.v.dtype:
            raise ValueError(
                f"fresh_k is {tuple(self.k.shape)} of {self.k.dtype}, fresh_v {tuple(self.v.shape)}"
                f" of {self.v.dtype}"
            )
        if positions.shape != (num_tokens,):
            raise ValueError(
                f"positions is {tuple(positions.shape)}; expected one for each of {num_tokens}"
                " tokens"
            )
        if looks_at_values and num_tokens and int(positions.min()) < 0:
            raise ValueError(
                f"positions holds {int(positions.min())}; positions are counted from 0"
            )

    def checked_retrieved(
        self, k: torch.Tensor | None, v: torch.Tensor | None, batch: _Batch
    ) -> _Pair | None:
        """Return the retrieved pair of all tokens; None where nothing is valid.

        Raises:
            ValueError: It has another shape, dtype or device than the fresh.
        """
        if not batch.valid_mask.any():
            return None
        shape = list(self.k.shape)
        shape[self.token_dim] = batch.num_tokens
        for name, side in (("retrieved_k", k), ("retrieved_v", v)):
            if (
                side is None
                or list(side.shape) != shape
                or side.dtype != self.k.dtype
                or side.device != self.k.device
            ):
                found = (
                    "None"
                    if side is None
                    else f"{tuple(side.shape)} of {side.dtype} on {side.device}"
                )
                raise ValueError(
                    f"{name} is {found}; expected {tuple(shape)} of {self.k.dtype} on"
                    f" {self.k.device}, as the fresh"
                )
        assert k is not None
        assert v is not None
        return k, v


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
        batch = _Batch.checked(
            valid_mask, original_positions, query_start_loc, looks_at_values=is_whole
        )
        fresh = _Layer(fresh_q, fresh_k, fresh_v, token_dim)
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
        self, batch: _Batch, fresh: _Layer, retrieved: _Pair, positions: torch.Tensor
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
            fresh.q.index_select(fresh.token_dim, indices),
            fresh.k,
            fresh.v,
            positions[indices],
            indices,
            starts,
        )

    def _fill(
        self,
        selected: _Selected,
        batch: _Batch,
        fresh: _Layer,
        retrieved: _Pair | None,
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
