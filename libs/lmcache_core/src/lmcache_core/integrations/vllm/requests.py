"""What the scheduler's side knows of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_core.integrations.vllm.groups import NULL_BLOCK, CacheGroup, blocks_of
from lmcache_core.integrations.vllm.names import ChunkNames
from lmcache_core.integrations.vllm.offers import Offer
from lmcache_core.integrations.vllm.plan import ChunkRun


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
