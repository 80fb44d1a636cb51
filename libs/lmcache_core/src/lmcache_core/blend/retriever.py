"""Finds the KV of those parts of a prompt that end with a special token sequence."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from lmcache_core._typing import override
from lmcache_core.blend.interfaces import (
    BlendRetriever,
    BlendRetrieverResult,
    BlendRetrieverTask,
    request_starts,
)
from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine

MAX_SEGMENTS_AT_ONCE = 8
"""Segments retrieved concurrently."""
RETRIEVAL_TIMEOUT_S = 120.0
"""Limit for all segments of a batch together. It exceeds every deadline of the tiers: a longer wait
is due to a defect.
"""
_FORMATS = ("vllm", "huggingface")


def split_after(tokens: torch.Tensor, separator: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a prompt, each except the last with the separator at its end.

    Args:
        tokens: Token ids `[num_tokens]`.
        separator: Token ids, at least one, of the same dtype and device.
    """
    width, start, parts = len(separator), 0, []
    if len(tokens) >= width:
        for at in (tokens.unfold(0, width, 1) == separator).all(1).nonzero().flatten().tolist():
            if at >= start:  # else it overlaps the previous one
                parts.append(tokens[start : at + width])
                start = at + width
    return [*parts, tokens[start:]] if start < len(tokens) else parts


@dataclass(frozen=True, eq=False)
class RetrievedSegment:
    """KV of one segment.

    Attributes:
        layers: K and V of each layer, `[num_tokens, num_heads, head_size]`; None if nothing was
            found.
        is_loaded: Booleans on the CPU, `[num_tokens]`; other rows of K and V are meaningless.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] | None
    is_loaded: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Segment:
    """A part that is retrieved as one.

    Attributes:
        tokens: Its tokens in the prompt, `[num_tokens]`.
        chain: The tokens to look up: these, plus those that complete their last chunk if that is
            cached as a whole.
    """

    tokens: torch.Tensor
    chain: torch.Tensor


class SPTBlendRetrieverTask(BlendRetrieverTask):
    """The retrieval of the segments of a batch.

    Args:
        token_segments: Token ids of each segment, in the order of the input.
        tasks: Future result of each segment.
        fmt: Format of the KV, "vllm" or "huggingface"; in both, the heads of a token are adjacent.

    Raises:
        ValueError: The format is unknown, or there is not one task for each segment.
    """

    def __init__(
        self,
        token_segments: Sequence[torch.Tensor],
        tasks: Sequence[Future[RetrievedSegment]],
        fmt: str,
    ) -> None:
        if fmt not in _FORMATS:
            raise ValueError(f"KV format {fmt!r}; known are {', '.join(_FORMATS)}")
        if len(token_segments) != len(tasks):
            raise ValueError(f"{len(tasks)} tasks for {len(token_segments)} segments")
        self._token_segments = token_segments
        self._tasks = tasks

    @override
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Return one layer; K and V are `[num_tokens, num_heads * head_size]`.

        Raises:
            ValueError: There is no such layer.
            TimeoutError: The segments did not arrive within `RETRIEVAL_TIMEOUT_S`.
            Exception: An error of the engine for a segment; with `error_handling`, that segment is
                not found instead.
        """
        found = next((part.layers for part in self._parts if part.layers is not None), None)
        if found is None:
            return BlendRetrieverResult(None, None, self._valid_mask, self._original_positions)
        if not 0 <= layer_id < len(found):
            raise ValueError(f"layer {layer_id} of KV that has {len(found)}")
        k, v = (self._whole(layer_id, side, found[layer_id][side]) for side in (0, 1))
        return BlendRetrieverResult(k, v, self._valid_mask, self._original_positions.to(k.device))

    def _whole(self, layer_id: int, side: int, like: torch.Tensor) -> torch.Tensor:
        sides = [
            (
                like.new_empty((len(part.is_loaded), *like.shape[1:]))
                if part.layers is None
                else part.layers[layer_id][side]
            )
            for part in self._parts
        ]
        return torch.cat(sides).flatten(1)

    @cached_property
    def _parts(self) -> list[RetrievedSegment]:
        late = wait(self._tasks, RETRIEVAL_TIMEOUT_S).not_done
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(self._tasks)} segments did not come within"
                f" {RETRIEVAL_TIMEOUT_S:.0f} s"
            )
        return [task.result() for task in self._tasks]

    @cached_property
    def _valid_mask(self) -> torch.Tensor:
        return torch.cat(
            [torch.zeros(0, dtype=torch.bool), *(part.is_loaded for part in self._parts)]
        )

    @cached_property
    def _original_positions(self) -> torch.Tensor:
        whole = torch.cat(
            [
                torch.zeros(0, dtype=torch.int64),
                *(torch.arange(len(segment)) for segment in self._token_segments),
            ]
        )
        return whole.masked_fill(~self._valid_mask, 0)


class SPTBlendRetriever(BlendRetriever):
    """Splits prompts after each occurrence of a special token sequence and retrieves every segment
    as a separate prompt.

    The segments of `x x x spt y y spt z z` are `x x x spt`, `y y spt` and `z z`; so a text to be
    found must be stored with the sequence at its end. Whole chunks are found, and with
    `save_unfull_chunk` the last part of a segment, too. First segments that are cached together, as
    the prefix that they form in this prompt, are retrieved as such.

    Args:
        spt: Token ids of the sequence, at least one.
        cache_engine: An open engine for KV as nested tuples (`VLLMNestedTupleGPUConnector`).
        metadata: Describes the KV.
        device: Device of the results; by default that of the input tokens.

    Raises:
        ValueError: The sequence is empty, or its elements are not token ids.
    """

    def __init__(
        self,
        spt: torch.Tensor,
        cache_engine: LMCacheEngine,
        metadata: LMCacheEngineMetadata,
        device: torch.device | None = None,
    ) -> None:
        if spt.ndim != 1 or len(spt) == 0 or not _are_ids(spt):
            raise ValueError(
                f"the special token sequence is {tuple(spt.shape)} of {spt.dtype}; expected at"
                " least one token id"
            )
        self._spt = spt.cpu().to(torch.int64)
        self._engine = cache_engine
        self._metadata = metadata
        self._device = device
        self._is_closed = False
        self._threads = Workers("lmcache-blend", MAX_SEGMENTS_AT_ONCE)
        self._threads.open()

    def close(self) -> None:
        """Wait for retrievals underway, and stop the threads; retrievals that have not begun, or
        come later, find nothing. Idempotent.
        """
        self._is_closed = True
        self._threads.close()

    @override
    def new_request(
        self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> SPTBlendRetrieverTask:
        """Ask the tiers how much of each prompt with several segments is cached as a prefix, one
        prompt after the other within the deadlines of the tiers, and start retrieving.

        Raises:
            ValueError: The tokens are not a row of token ids, or `query_start_loc` does not rise
                from 0 to their number.
        """
        if input_tokens.ndim != 1 or not _are_ids(input_tokens):
            raise ValueError(
                f"input_tokens is {tuple(input_tokens.shape)} of {input_tokens.dtype}; expected"
                " token ids, [num_tokens]"
            )
        starts = request_starts(query_start_loc, len(input_tokens))
        tokens = input_tokens.cpu().to(torch.int64)
        segments = [
            segment
            for start, end in pairwise(starts)
            for segment in self._segments(tokens[start:end])
        ]
        device = self._device or input_tokens.device
        tasks = [self._threads.submit(self._retrieve, segment, device) for segment in segments]
        return SPTBlendRetrieverTask(
            [segment.tokens for segment in segments], tasks, self._metadata.fmt
        )

    def _segments(self, tokens: torch.Tensor) -> list[_Segment]:
        """Return the parts of one request. Segments that are cached as the prefix that they form
        here are one part: none of its tokens need recomputing.
        """
        parts = split_after(tokens, self._spt)
        segments = [_Segment(part, part) for part in parts]
        if len(parts) < 2 or self._is_closed:
            return segments
        num_exact = self._engine.lookup(tokens)
        ends = list(accumulate(len(part) for part in parts))
        num_joined = sum(end <= num_exact for end in ends)
        if num_joined < 2:
            return segments
        end, chunk_size = ends[num_joined - 1], self._engine.config.chunk_size
        return [
            _Segment(tokens[:end], tokens[: -(-end // chunk_size) * chunk_size]),
            *segments[num_joined:],
        ]

    def _retrieve(self, segment: _Segment, device: torch.device) -> RetrievedSegment:
        num_tokens, num_asked, config = len(segment.tokens), len(segment.chain), self._engine.config
        if self._is_closed or (num_asked < config.chunk_size and not config.save_unfull_chunk):
            return RetrievedSegment(None, torch.zeros(num_tokens, dtype=torch.bool))
        num_layers, _, _, num_heads, head_size = self._metadata.kv_shape
        with torch.inference_mode():
            room = torch.empty(
                (num_layers, 2, num_asked, num_heads, head_size),
                dtype=getattr(torch, self._metadata.kv_dtype_name),
                device=device,
            )
        is_loaded = self._engine.retrieve(segment.chain, kvcaches=tuple((k, v) for k, v in room))[
            :num_tokens
        ]
        layers = tuple((k[:num_tokens], v[:num_tokens]) for k, v in room)
        return RetrievedSegment(layers if is_loaded.any() else None, is_loaded)


def _are_ids(tokens: torch.Tensor) -> bool:
    return not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
