"""Selects the tokens of a request that are recomputed although their KV was retrieved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import torch
from lmcache_kernels.blend_select import blend_select

from lmcache_core.config import BLEND_POLICIES

RECOMPUTED_TAIL_TOKENS = 1
"""Tokens at the end of each request that are always computed: logits are not cached."""
_SLACK = 1e-9
"""Keeps a ratio of two decimals from losing a token to its binary representation."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens of a batch.

    Attributes:
        valid_mask: Booleans on the CPU, `[num_tokens]`: whether KV was retrieved.
        is_valid: The same on the device of the others.
        original_positions: `[num_tokens]`: positions at which their KV was computed.
        positions: `[num_tokens]`: positions in their requests.
        starts: First token of each request, followed by the number of tokens.
        deviation: float32 `[num_tokens]`: distance of the retrieved KV from the fresh one, 0 where
            not valid; None if unused.
    """

    valid_mask: torch.Tensor
    is_valid: torch.Tensor
    original_positions: torch.Tensor
    positions: torch.Tensor
    starts: Sequence[int]
    deviation: torch.Tensor | None


class SelectionPolicy(Protocol):
    """Selects the tokens that are recomputed.

    For example every n-th token, for an executor `CacheBlendImpl(0.0, EveryNth(8))`:

        @dataclass(frozen=True)
        class EveryNth:
            interval: int
            check_layer: int = 0
            needs_deviation: bool = False

            def choose(self, candidates: Candidates) -> torch.Tensor:
                return candidates.positions % self.interval == 0
    """

    @property
    def check_layer(self) -> int:
        """The layer on which tokens are selected; after it only these are computed."""

    @property
    def needs_deviation(self) -> bool:
        """Whether the selection depends on values."""

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """Return booleans `[num_tokens]` on the device of the candidates.

        Tokens that are not valid, and the last `RECOMPUTED_TAIL_TOKENS` of each request, are
        computed whether or not they are selected.
        """


@dataclass(frozen=True)
class MostDeviating:
    """CacheBlend (arXiv 2405.16444): tokens whose KV deviates most on an early layer deviate most
    on all layers.

    Attributes:
        ratio: Share of a request's valid tokens, rounded down; tokens that are always computed come
            on top.
        check_layer: Layer on which deviations are measured. The KV of layer 0 depends only on the
            token.
    """

    ratio: float
    check_layer: int = 1
    needs_deviation: bool = True

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """See `SelectionPolicy.choose`; among tokens with equal deviation, the first."""
        assert candidates.deviation is not None
        counts = [
            share_of(int(candidates.valid_mask[a:b].sum()), self.ratio)
            for a, b in pairwise(candidates.starts)
        ]
        return blend_select(
            candidates.deviation,
            candidates.is_valid,
            candidates.starts,
            counts,
            RECOMPUTED_TAIL_TOKENS,
        )


@dataclass(frozen=True)
class FirstOfChunk:
    """LegoLink (EPIC, arXiv 2410.15332): the first tokens of each chunk, which saw only the chunk's
    own beginning.

    Attributes:
        ratio: Share of each chunk's tokens, rounded up; a chunk begins at a token that was the
            first of its prompt. A chunk that also begins its prompt here is at its original place,
            and left unchanged.
    """

    ratio: float
    check_layer: int = 0
    needs_deviation: bool = False

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """See `SelectionPolicy.choose`."""
        valid, originals = candidates.is_valid, candidates.original_positions
        is_first = valid & (originals == 0)
        heads = torch.tensor(
            [start for start, end in pairwise(candidates.starts) if start < end],
            dtype=torch.int64,
            device=valid.device,
        )
        begins = is_first.clone()
        begins[heads] = True  # a request does not continue a chunk of the previous one
        chunk_of = begins.long().cumsum(0)
        lengths = torch.zeros(len(valid) + 1, dtype=torch.float64, device=valid.device).index_add_(
            0, chunk_of, valid.double()
        )
        counts = torch.ceil(lengths * self.ratio - _SLACK)
        counts[chunk_of[heads[is_first[heads] & (candidates.positions[heads] == 0)]]] = 0
        return valid & (originals < counts[chunk_of])


def with_the_rest(chosen: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """Return new booleans `[num_tokens]`: the selected tokens, and those that are always
    computed.
    """
    chosen = chosen | ~candidates.is_valid
    for start, end in pairwise(candidates.starts):
        chosen[max(start, end - RECOMPUTED_TAIL_TOKENS) : end] = True
    return chosen


_POLICIES: Mapping[str, Callable[[float], SelectionPolicy]] = MappingProxyType(
    {"deviation": MostDeviating, "first_of_chunk": FirstOfChunk}
)


def create_policy(name: str, recompute_ratio: float) -> SelectionPolicy:
    """Return the policy with that name.

    Args:
        name: One of `BLEND_POLICIES`.
        recompute_ratio: Share of the valid tokens that it selects, 0 … 1.

    Raises:
        ValueError: The name is unknown, or the ratio is out of range.
    """
    if name not in _POLICIES:
        raise ValueError(f"selection policy {name!r}; known are {', '.join(BLEND_POLICIES)}")
    if not 0 <= recompute_ratio <= 1:
        raise ValueError(f"recompute_ratio is {recompute_ratio}; it must be 0 … 1")
    return _POLICIES[name](recompute_ratio)


def share_of(count: int, ratio: float) -> int:
    """Return `count * ratio`, rounded down."""
    return min(count, int(count * ratio + _SLACK))
