"""What an executor is given, checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V."""


@dataclass(frozen=True, eq=False)
class Batch:
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
    ) -> Batch:
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
class Layer:
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
        self, k: torch.Tensor | None, v: torch.Tensor | None, batch: Batch
    ) -> Pair | None:
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

    def taken(self, side: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return these tokens of Q, K or V."""
        return side.index_select(self.token_dim, indices)
