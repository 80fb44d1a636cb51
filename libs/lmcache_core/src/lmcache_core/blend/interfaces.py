"""The parts of blending: a retriever, which fetches the KV of chunks that are not a prefix, and an
executor, which corrects it.

Source: the LMCache documentation, "LMCache Blend".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class BlendRetrieverResult:
    """One layer of a retriever's result.

    Attributes:
        k: K as cached, `[num_tokens, …]`; None if nothing was found.
        v: V, of the same shape; None if nothing was found.
        valid_mask: Booleans on the CPU, `[num_tokens]`: whether the rows of K and V are valid.
        original_positions: int64 `[num_tokens]`, on their device: the token's position when its KV
            was computed; 0 where not valid.
    """

    k: torch.Tensor | None
    v: torch.Tensor | None
    valid_mask: torch.Tensor
    original_positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlendOutput:
    """The input of a layer's attention.

    Attributes:
        q: Q of the selected tokens, in order.
        k: K of all tokens.
        v: V of all tokens.
        positions: Positions of the selected tokens in their requests.
        local_indices: int64: rows of the fresh Q that were selected.
        query_start_loc: First selected token of each request, followed by their number; None if
            this layer selected nothing.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    local_indices: torch.Tensor
    query_start_loc: torch.Tensor | None


class BlendRetrieverTask(ABC):
    """A retrieval that is underway."""

    @abstractmethod
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait for one layer. It has as many tokens as the input.

        Args:
            layer_id: From 0.
        """


class BlendRetriever(ABC):
    """Finds the KV of parts of prompts, independent of their position."""

    @abstractmethod
    def new_request(
        self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> BlendRetrieverTask:
        """Start retrieving, without waiting for KV.

        Args:
            input_tokens: Token ids of all requests of a batch, concatenated, `[num_tokens]`.
            query_start_loc: First token of each request, followed by the number of tokens,
                `[num_requests + 1]`.
        """


class BlendExecutor(ABC):
    """Decides, layer by layer, which tokens are recomputed, and replaces their retrieved KV."""

    @abstractmethod
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
        """Blend one layer. Layers come in order from 0, which begins a new batch; no argument is
        changed.

        Args:
            layer_id: From 0.
            retrieved_k: K as cached, of all tokens: rotated at `original_positions`. None if
                nothing was found.
            retrieved_v: V of all tokens. None if nothing was found.
            valid_mask: On the CPU, `[num_tokens]`: whether a token has retrieved KV.
            original_positions: `[num_tokens]`: the token's position when its KV was computed.
            fresh_q: Q of the tokens that are still computed, rotated at `positions`.
            fresh_k: K of these, also rotated.
            fresh_v: V of these.
            positions: Their positions in their requests.
            query_start_loc: First token of each request among all tokens, followed by their number,
                `[num_requests + 1]`; the same in every layer.
            token_dim: The dimension of Q, K and V that counts tokens.
        """


def request_starts(query_start_loc: torch.Tensor, num_tokens: int) -> list[int]:
    """Return the first token of each request of a batch, followed by the number of tokens, as plain
    integers.

    Raises:
        ValueError: They do not rise from 0 to the number of tokens.
    """
    starts: list[int] = query_start_loc.tolist() if query_start_loc.ndim == 1 else []
    if not starts or (starts[0], starts[-1]) != (0, num_tokens) or starts != sorted(starts):
        raise ValueError(
            f"query_start_loc is {query_start_loc.tolist()}; it must rise from 0 to the number of"
            f" tokens, {num_tokens}"
        )
    return starts


def create_index(
    ndims: int, target_dim: int, index: torch.Tensor | slice
) -> tuple[torch.Tensor | slice, ...]:
    """Return an index of `ndims` dimensions that selects everything in all but one.

    Args:
        ndims: Dimensions of the tensor to be indexed.
        target_dim: The one dimension; negative counts from the last.
        index: What to select in it.

    Raises:
        ValueError: There is no such dimension.
    """
    if not -ndims <= target_dim < ndims:
        raise ValueError(f"dimension {target_dim} of a tensor of {ndims}")
    whole: list[torch.Tensor | slice] = [slice(None)] * ndims
    whole[target_dim] = index
    return tuple(whole)


def indices_to_mask(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Return booleans `[size]` on the device of the indices, True at these.

    Raises:
        ValueError: An index is negative or not below `size`.
    """
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise ValueError(
            f"indices reach from {int(indices.min())} to {int(indices.max())}; the mask has {size}"
        )
    mask = torch.zeros(size, dtype=torch.bool, device=indices.device)
    mask[indices] = True
    return mask


def mask_to_indices(mask: torch.Tensor) -> torch.Tensor:
    """Return int64 indices, in order, of the non-zero elements of a one-dimensional mask, on its
    device.
    """
    return mask.nonzero().flatten()
