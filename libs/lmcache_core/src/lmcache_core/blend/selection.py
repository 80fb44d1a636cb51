"""Which tokens of a request are computed anew, though their KV was retrieved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch

MIN_RECOMPUTED_TAIL_TOKENS = 1
"""Tokens at the end of each request that are always computed: logits are not cached."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens of one request.

    Attributes:
        is_valid: Booleans `[num_tokens]`: whether KV was retrieved.
        original_positions: int64 `[num_tokens]`: where they stood when it was computed.
        deviation: float32 `[num_tokens]`: how far the retrieved KV is from the fresh; None before anything was computed. 0 where not valid.
    """

    is_valid: torch.Tensor
    original_positions: torch.Tensor
    deviation: torch.Tensor | None


class SelectionPolicy(Protocol):
    """Chooses among the valid tokens of a request. What is not valid, and the end of a request, is computed in any case."""

    @property
    def check_layer(self) -> int:
        """The layer on which tokens are chosen; behind it only these are computed."""

    @property
    def needs_deviation(self) -> bool:
        """Whether the choice depends on values."""

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """Booleans `[num_tokens]` on the device of the candidates."""


@dataclass(frozen=True)
class MostDeviating:
    """CacheBlend (arXiv 2405.16444): the tokens whose KV deviates most on an early layer deviate most on all.

    Attributes:
        ratio: Share of a request's valid tokens, rounded down.
        check_layer: Where deviations are looked at. The KV of layer 0 depends on nothing but the token.
    """

    ratio: float
    check_layer: int = 1
    needs_deviation: bool = True

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """See `SelectionPolicy`; of tokens that deviate alike, the first."""
        assert candidates.deviation is not None
        chosen = torch.zeros_like(candidates.is_valid)
        deviation = candidates.deviation.masked_fill(~candidates.is_valid, -1.0)
        order = deviation.argsort(descending=True, stable=True)
        chosen[order[: share_of(int(candidates.is_valid.sum()), self.ratio)]] = True
        return chosen


@dataclass(frozen=True)
class FirstOfChunk:
    """LegoLink (EPIC, arXiv 2410.15332): the first tokens of each chunk, whose attention went to nothing but the chunk's own beginning.

    Attributes:
        ratio: Share of each chunk's tokens, rounded up; a chunk begins where a token was the first of its prompt.
    """

    ratio: float
    check_layer: int = 0
    needs_deviation: bool = False

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """See `SelectionPolicy`."""
        begins = candidates.is_valid & (candidates.original_positions == 0)
        chunk_of = begins.long().cumsum(0)
        lengths = torch.bincount(chunk_of[candidates.is_valid], minlength=int(chunk_of.max()) + 1 if len(chunk_of) else 1)
        counts = torch.ceil(lengths.double() * self.ratio - 1e-9)
        return candidates.is_valid & (candidates.original_positions < counts[chunk_of])


@dataclass(frozen=True)
class NoneAtAll:
    """Retrieved KV is taken as it is: the least work, and for comparison."""

    check_layer: int = 0
    needs_deviation: bool = False

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """See `SelectionPolicy`."""
        return torch.zeros_like(candidates.is_valid)


_POLICIES: Mapping[str, Callable[[float], SelectionPolicy]] = MappingProxyType(
    {"deviation": partial(MostDeviating), "first_of_chunk": partial(FirstOfChunk), "none": lambda _: NoneAtAll()}
)
POLICY_NAMES = tuple(_POLICIES)


def create_policy(name: str, recompute_ratio: float) -> SelectionPolicy:
    """The policy of that name.

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
    """`count * ratio`, rounded down; a ratio of two decimals is not cheated by its binary form."""
    return min(count, int(count * ratio + 1e-9))
