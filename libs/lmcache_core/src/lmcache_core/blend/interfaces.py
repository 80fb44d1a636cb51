"""What blending is made of: a retriever, which brings the KV of chunks that are no prefix, and an
executor, which mends it.

Source: the LMCache documentation, "LMCache Blend".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class BlendRetrieverResult:
    """One layer of what a retriever found.

    Attributes:
        k: K as it was cached, `[num_tokens, …]`; None when nothing was found.
        v: V, of the same shape; None when nothing was found.
        valid_mask: Booleans on the CPU, `[num_tokens]`: whether the row of K and V means anything.
        original_positions: int64 `[num_tokens]`, on their device: where the token stood when its KV
            was computed; 0 where not valid.
    """

    k: torch.Tensor | None
    v: torch.Tensor | None
    valid_mask: torch.Tensor
    original_positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlendOutput:
    """What a layer's attention is to be computed with.

    Attributes:
        q: Q of the selected tokens, in order.
        k: K of all tokens.
        v: V of all tokens.
        positions: Positions of the selected tokens in their requests.
        local_indices: int64: which rows of the fresh Q were selected.
        query_start_loc: Where each request begins among the selected tokens, and their number; None
            when this layer selected nothing.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    local_indices: torch.Tensor
    query_start_loc: torch.Tensor | None


class BlendRetrieverTask(ABC):
    """A retrieval that is under way."""

    @abstractmethod
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait for one layer. It has as many tokens as the input.

        Args:
            layer_id: From 0.
        """


class BlendRetriever(ABC):
    """Finds the KV of parts of prompts, wherever they stand in them."""

    @abstractmethod
    def new_request(
        self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> BlendRetrieverTask:
        """Begin to retrieve; does not wait for KV.

        Args:
            input_tokens: Token ids of all requests of a batch, one after the other, `[num_tokens]`.
            query_start_loc: Where each request begins, and the number of tokens, `[num_requests +
                1]`.
        """


class BlendExecutor(ABC):
    """Decides, layer by layer, which tokens are recomputed, and puts their KV in the place of
    the retrieved.
    """

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
            retrieved_k: K as cached, of all tokens: rotated at `original_positions`. None when
                nothing was found.
            retrieved_v: V of all tokens. None when nothing was found.
            valid_mask: On the CPU, `[num_tokens]`: whether a token has retrieved KV.
            original_positions: `[num_tokens]`: where the token stood when its KV was computed.
            fresh_q: Q of the tokens that are still computed, rotated at `positions`.
            fresh_k: K of these, rotated likewise.
            fresh_v: V of these.
            positions: Their positions in their requests.
            query_start_loc: Where each request begins among all tokens, and their number,
                `[num_requests + 1]`; the same in every layer.
            token_dim: Which dimension of Q, K and V counts tokens.
        """


def request_starts(query_start_loc: torch.Tensor, num_tokens: int) -> list[int]:
    """Return where each request of a batch begins, and the number of tokens, as plain numbers.

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
    """Return an index of `ndims` dimensions that takes everything but for one.

    Args:
        ndims: Dimensions of the tensor to be indexed.
        target_dim: The one; negative counts from the last.
        index: What to take of it.

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
    """Return int64 indices, in order, of what is not zero in a one-dimensional mask, on its
    device.
    """
    return mask.nonzero().flatten()
