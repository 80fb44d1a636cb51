"""Which tokens of a request are recomputed, though their KV was retrieved."""

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
"""A ratio of two decimals is not cheated by its binary form."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens of a batch.

    Attributes:
        valid_mask: Booleans on the CPU, `[num_tokens]`: whether KV was retrieved.
        is_valid: The same on the device of the others.
        original_positions: `[num_tokens]`: where they stood when it was computed.
        positions: `[num_tokens]`: where they stand in their requests.
        starts: Where each request begins, and the number of tokens.
        deviation: float32 `[num_tokens]`: how far the retrieved KV is from the fresh, 0 where not
            valid; None if unused.
    """

    valid_mask: torch.Tensor
    is_valid: torch.Tensor
    original_positions: torch.Tensor
    positions: torch.Tensor
    starts: Sequence[int]
    deviation: torch.Tensor | None


class SelectionPolicy(Protocol):
    """Chooses the tokens that are recomputed.

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
        """The layer on which tokens are chosen; after it only these are computed."""

    @property
    def needs_deviation(self) -> bool:
        """Whether the choice depends on values."""

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """Return booleans `[num_tokens]` on the device of the candidates.

        What is not valid, and the last `RECOMPUTED_TAIL_TOKENS` of each request, is computed
        whether it is among them or not.
        """


@dataclass(frozen=True)
class MostDeviating:
    """CacheBlend (arXiv 2405.16444): the tokens whose KV deviates most on an early layer deviate
    most on all.

    Attributes:
        ratio: Share of a request's valid tokens, rounded down; what is computed in any case comes
            on top.
        check_layer: Where deviations are looked at. The KV of layer 0 depends on nothing but the
            token.
    """

    ratio: float
    check_layer: int = 1
    needs_deviation: bool = True

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """See `SelectionPolicy.choose`; of tokens that deviate alike, the first."""
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
    """LegoLink (EPIC, arXiv 2410.15332): the first tokens of each chunk, which saw nothing but the
    chunk's own beginning.

    Attributes:
        ratio: Share of each chunk's tokens, rounded up; a chunk begins where a token was the first
            of its prompt. One that begins its prompt here too is where it was computed, and is left
            as it is.
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
        begins[heads] = True  # what a request has is no part of a chunk of the one before
        chunk_of = begins.long().cumsum(0)
        lengths = torch.zeros(len(valid) + 1, dtype=torch.float64, device=valid.device).index_add_(
            0, chunk_of, valid.double()
        )
        counts = torch.ceil(lengths * self.ratio - _SLACK)
        counts[chunk_of[heads[is_first[heads] & (candidates.positions[heads] == 0)]]] = 0
        return with_the_rest(valid & (originals < counts[chunk_of]), candidates)


@dataclass(frozen=True)
class NoneAtAll:
    """Takes retrieved KV unchanged: the least work, and for comparison."""

    check_layer: int = 0
    needs_deviation: bool = False

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """See `SelectionPolicy.choose`."""
        return with_the_rest(torch.zeros_like(candidates.is_valid), candidates)


def with_the_rest(chosen: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """Return booleans `[num_tokens]`, new: what was chosen, and what is computed in any case."""
    chosen = chosen | ~candidates.is_valid
    for start, end in pairwise(candidates.starts):
        chosen[max(start, end - RECOMPUTED_TAIL_TOKENS) : end] = True
    return chosen


_POLICIES: Mapping[str, Callable[[float], SelectionPolicy]] = MappingProxyType(
    {"deviation": MostDeviating, "first_of_chunk": FirstOfChunk, "none": lambda _: NoneAtAll()}
)
POLICY_NAMES = BLEND_POLICIES


def create_policy(name: str, recompute_ratio: float) -> SelectionPolicy:
    """Return the policy of that name.

    Args:
        name: One of `POLICY_NAMES`.
        recompute_ratio: Share of the valid tokens that it chooses, 0 … 1.

    Raises:
        ValueError: There is none, or the ratio is no share.
    """
    if name not in _POLICIES:
        raise ValueError(f"selection policy {name!r}; known are {', '.join(POLICY_NAMES)}")
    if not 0 <= recompute_ratio <= 1:
        raise ValueError(f"recompute_ratio is {recompute_ratio}; it must be 0 … 1")
    return _POLICIES[name](recompute_ratio)


def share_of(count: int, ratio: float) -> int:
    """Return `count * ratio`, rounded down."""
    return min(count, int(count * ratio + _SLACK))
