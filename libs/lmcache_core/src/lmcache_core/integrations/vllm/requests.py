"""What the scheduler's side knows of each request, and how its chunks are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_core.integrations.vllm.groups import NULL_BLOCK, CacheGroup, blocks_of
from lmcache_core.integrations.vllm.identity import Roots
from lmcache_core.integrations.vllm.offers import Offer
from lmcache_core.integrations.vllm.plan import ChunkRun
from lmcache_core.token_database import MultimodalSpan
from lmcache_core.token_database.hashing import chain_hashes, tokens_as_uint32


class ChunkNames:
    """The chain of chunk hashes of one request.

    Args:
        root: What the chain begins with, 32 bytes.
        chunk_size: Tokens in a chunk; a shorter rest has no name.
        spans: Multimodal contents behind placeholder tokens.
    """

    def __init__(self, root: bytes, chunk_size: int, spans: Sequence[MultimodalSpan] = ()) -> None:
        self._root = root
        self._chunk_size = chunk_size
        self._spans = tuple(spans)
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Name the chunks that these tokens complete.

        Args:
            token_ids: All tokens of the request from the first, those of earlier calls unchanged.

        Returns:
            The hashes of all whole chunks.
        """
        size, known = self._chunk_size, len(self.hashes)
        num_chunks = len(token_ids) // size
        if num_chunks > known:
            if self._spans:  # their places count from the first token of the sequence
                ids = tokens_as_uint32(token_ids[: num_chunks * size])
                chain = chain_hashes(self._previous, ids, size, self._spans, first=known * size)
            else:
                chain = chain_hashes(
                    self._previous,
                    tokens_as_uint32(token_ids[known * size : num_chunks * size]),
                    size,
                )
            self.hashes += [digest for _, _, digest in chain]
        return self.hashes

    @property
    def _previous(self) -> bytes:
        return self.hashes[-1] if self.hashes else self._root


@dataclass
class RequestState:
    """One request, from when vLLM first speaks of it until it has finished.

    Attributes:
        request: vLLM's own object.
        names: Names of its chunks; None while they cannot be told.
        names_version: Under which version of the roots, and of how long a prompt.
        adapter: What named its adapter then; "" where it has none.
        tables: Its blocks in each group, as the scheduler has told them.
        dropped: For each group, how many blocks from the first have been taken away again.
        stored: For each group, how many chunks from the first need no storing (any more).
        num_local: Tokens that vLLM has itself, as it last said, and those that are loaded for it
            since.
        offer: What can be loaded, once that is known.
        is_new: The store has answered that it has no more of its chunks than it offered.
        asked_at: When its chunks were first asked for, since the last answer; None: they are not
            asked for. Seconds, monotonic.
        polled_at: When they were last asked for.
        load: `[begin, end)` tokens that are to be loaded in the next step.
        is_loading: An asynchronous load is on its way.
        gave_up: Nothing more is loaded for it: a load failed.
        is_outdated: The weights, or its adapter's, have been replaced since it began: its KV is
            neither loaded nor stored.
    """

    request: Any
    names: ChunkNames | None = None
    names_version: object = None
    adapter: str = ""
    tables: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    num_local: int = 0
    offer: Offer | None = None
    is_new: bool = False
    asked_at: float | None = None
    polled_at: float = 0.0
    load: tuple[int, int] | None = None
    is_loading: bool = False
    gave_up: bool = False
    is_outdated: bool = False

    @property
    def request_id(self) -> str:
        """vLLM's name for it."""
        return str(self.request.request_id)

    @property
    def may_load(self) -> bool:
        """Whether KV may be loaded for it: not once a load has failed, nor where vLLM needs
        every token computed (prompt logprobs).
        """
        return not (self.gave_up or getattr(self.request, "skip_reading_prefix_cache", False))

    def forget_offer(self) -> None:
        """What was offered has been taken, or is out of date."""
        self.offer, self.asked_at = None, None

    def set_blocks(self, groups: Sequence[CacheGroup], block_ids: Sequence[Sequence[int]]) -> None:
        """The whole block tables, by vLLM's numbers of the groups."""
        self.tables = [list(block_ids[group.index]) for group in groups]
        self.dropped = [0] * len(groups)

    def add_blocks(self, groups: Sequence[CacheGroup], block_ids: Sequence[Sequence[int]]) -> None:
        """Blocks that have been added at the ends of the tables."""
        for table, group in zip(self.tables, groups, strict=True):
            table.extend(block_ids[group.index])

    def drop_blocks(self, groups: Sequence[CacheGroup], num_computed: int) -> None:
        """Forget blocks that vLLM takes away because no window reaches them any more. Without
        tables there are none to forget.
        """
        for table, group in zip(self.tables, groups, strict=False):
            end = min(group.num_dropped_tokens(num_computed) // group.block_size, len(table))
            begin = self.dropped[group.number]
            if begin < end:
                table[begin:end] = [NULL_BLOCK] * (end - begin)
                self.dropped[group.number] = end

    def complete_runs(
        self, groups: Sequence[CacheGroup], chunk_size: int, num_tokens: int
    ) -> list[ChunkRun]:
        """Chunks that are whole once so many tokens are computed, and are not stored yet; from
        now on they count as stored.
        """
        assert self.names is not None
        num_chunks = min(num_tokens // chunk_size, len(self.names.hashes))
        runs = []
        for group, table in zip(groups, self.tables, strict=True):
            first = self.stored[group.number]
            self.stored[group.number] = max(first, num_chunks)
            while first < num_chunks and NULL_BLOCK in blocks_of(
                table, group, chunk_size, first, 1
            ):
                first += 1
            if first < num_chunks:
                blocks = blocks_of(table, group, chunk_size, first, num_chunks - first)
                runs.append(
                    ChunkRun(
                        group.number, first, tuple(self.names.hashes[first:num_chunks]), blocks
                    )
                )
        return runs

    def load_runs(
        self, groups: Sequence[CacheGroup], chunk_size: int, begin: int, end: int
    ) -> list[ChunkRun]:
        """The chunks that tokens `[begin, end)` come from; of a windowed group only those that
        the next token looks at.
        """
        assert self.names is not None
        runs = []
        for group, table in zip(groups, self.tables, strict=True):
            first_token = max(begin, group.first_needed_token(end))
            first, last = first_token // chunk_size, -(-end // chunk_size)
            if first < last:
                blocks = blocks_of(table, group, chunk_size, first, last - first)
                runs.append(
                    ChunkRun(group.number, first, tuple(self.names.hashes[first:last]), blocks)
                )
        return runs


class RequestNamer:
    """Keeps the names of a request's chunks up to its tokens.

    Args:
        roots: What the chains begin with.
        chunk_size: Tokens in a chunk.
        contents: What else decides about the KV of multimodal contents; None: they have no names.
    """

    def __init__(self, roots: Roots, chunk_size: int, contents: str | None = "") -> None:
        self._roots = roots
        self._chunk_size = chunk_size
        self._contents = contents

    def name(self, state: RequestState) -> ChunkNames | None:
        """The names of a request's chunks, as far as its tokens are known; None when they cannot be
        told (yet).

        Under other roots than before, nothing of the request counts as stored. Nor when its prompt
        has grown: a session that goes on has dropped the token that was generated last, and may
        have new contents.
        """
        request = state.request
        if state.names is not None and not self._roots.adapters.is_loaded(
            _adapter(request), state.adapter
        ):
            state.is_outdated = True
        if state.is_outdated:
            return None
        version = self._roots.version, request.num_prompt_tokens
        if state.names is None or state.names_version != version:
            root, spans = self._roots.root_of(request), spans_of(request, self._contents)
            if root is None or spans is None or getattr(request, "prompt_embeds", None) is not None:
                return None
            state.names, state.names_version = ChunkNames(root, self._chunk_size, spans), version
            state.adapter = self._roots.adapters.name_of(_adapter(request)) or ""
            state.stored = [0] * len(state.stored)
        may_lose_tokens = getattr(request, "resumable", False)
        state.names.extend(
            request.all_token_ids[: request.num_prompt_tokens]
            if may_lose_tokens
            else request.all_token_ids
        )
        return state.names

    def check(self, state: RequestState) -> bool:
        """Whether what the request computes now has the names that it was given; takes longer
        than `name`.
        """
        state.is_outdated |= not self._roots.adapters.is_unchanged(_adapter(state.request))
        return not state.is_outdated


def spans_of(request: Any, contents: str | None = "") -> list[MultimodalSpan] | None:
    """The multimodal contents of a vLLM request; None when one of them has no name, so that the
    request cannot be cached.

    Args:
        request: vLLM's request.
        contents: What else decides about their KV; None: their names tell nothing.
    """
    spans = []
    for feature in getattr(request, "mm_features", None) or ():
        identifier, position = feature.identifier, feature.mm_position
        if contents is None or not identifier:
            return None
        spans.append(
            MultimodalSpan(f"{contents}{identifier}".encode(), position.offset, position.length)
        )
    return spans


def _adapter(request: Any) -> Any:
    return getattr(request, "lora_request", None)
