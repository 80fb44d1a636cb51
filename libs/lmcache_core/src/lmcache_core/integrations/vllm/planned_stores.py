"""What the workers are to store after a step, and from which blocks. Imports nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lmcache_core.integrations.vllm.groups import NULL_BLOCK, CacheGroup
from lmcache_core.integrations.vllm.options import ConnectorOptions
from lmcache_core.integrations.vllm.plan import Load, Store
from lmcache_core.integrations.vllm.requests import RequestNamer, RequestState

logger = logging.getLogger(__name__)


class StorePlanner:
    """Follows vLLM's block tables from step to step, and says which chunks are complete.

    Args:
        options: Options.
        groups: The cache groups.
        states: The requests, by vLLM's names; kept by their owner.
        namer: Names their chunks.
        num_workers: How many workers compute each step.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        groups: Sequence[CacheGroup],
        states: Mapping[str, RequestState],
        namer: RequestNamer,
        num_workers: int,
    ) -> None:
        self._chunk_size = options.engine.chunk_size
        self._saves_decode = options.engine.save_decode_cache
        self._groups = tuple(groups)
        self._states = states
        self._namer = namer
        self._num_workers = num_workers
        self._resting: list[RequestState] = []
        for group in groups:
            if group.num_dropped_tokens(self._chunk_size - 1) >= group.block_size:
                logger.warning(
                    "chunk_size=%d is longer than a sliding window of %d tokens: chunks of its"
                    " layers that are not computed in one step are not stored; set chunk_size to at"
                    " most %d",
                    *(self._chunk_size, group.window, group.window),
                )

    def plan(self, output: Any, loads: Sequence[Load]) -> tuple[Store, ...]:
        """What to store after this step.

        Args:
            output: vLLM's `SchedulerOutput`.
            loads: The step's loads.
        """
        scheduled = list(self._scheduled(output))
        loading = {load.request_id: load.begin for load in loads if not load.is_async}
        # What rests on blocks that are loaded in this step is stored when it is known that they
        # were; who loads is told at once where there is but one worker, which stores nothing of a
        # load that has failed.
        begun = (
            {new.req_id for new in output.scheduled_new_reqs}
            | set(output.scheduled_cached_reqs.resumed_req_ids)
            if loading
            else set()
        )
        self._resting = self._resting_on(
            loading, [state for state, _ in scheduled if state.request_id in begun]
        )
        late = {state.request_id for state in self._resting} | (
            set(loading) if self._num_workers > 1 else set()
        )
        if self._may_others_load(output):
            return ()
        return tuple(
            self._stores(
                (state, num_tokens)
                for state, num_tokens in scheduled
                if state.request_id not in late
            )
        )

    def load_failed(self) -> None:
        """A synchronous load of the last step has: vLLM computes its blocks again, in one step
        with what rests on them, or maybe not.
        """
        for state in self._resting:
            state.is_outdated = True

    def lose_track(self) -> None:
        """Planning has failed half-way: what is known of block tables may be wrong, and nothing
        more is stored from them.
        """
        for state in self._states.values():
            state.tables = []

    def _scheduled(self, output: Any) -> Iterable[tuple[RequestState, int]]:
        """Follow the block tables; each scheduled request, and how many of its tokens have KV
        after this step.
        """
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.set_blocks(self._groups, new.block_ids)
                state.drop_blocks(self._groups, new.num_computed_tokens)
                yield state, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._states.get(request_id)
            if state is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.set_blocks(self._groups, block_ids)
            elif block_ids is not None and state.tables:
                state.add_blocks(self._groups, block_ids)
            state.drop_blocks(self._groups, num_computed)
            yield state, num_computed + output.num_scheduled_tokens[request_id]

    def _resting_on(
        self, loading: Mapping[str, int], begun: Sequence[RequestState]
    ) -> list[RequestState]:
        """Requests that have blocks which are loaded for others in this step, or computed from such
        blocks.

        Args:
            loading: Who loads, and from which token.
            begun: Those that begin in this step, or are resumed: the others have blocks of their
                own, or had them before.
        """
        doubtful: set[int] = set()
        num_known = -1
        while num_known < len(
            doubtful
        ):  # who shares a block that is computed from doubtful ones computes more of them
            num_known = len(doubtful)
            for state in begun:
                for table, own in self._tables(state, loading):
                    doubtful.update(table[min(own, _first_in(doubtful, table)) :])
            doubtful.discard(NULL_BLOCK)
        return [
            state
            for state in begun
            if any(_first_in(doubtful, table) < own for table, own in self._tables(state, loading))
        ]

    def _tables(
        self, state: RequestState, loading: Mapping[str, int]
    ) -> Iterator[tuple[list[int], int]]:
        """A request's block tables, and the place from which on each is loaded for it: behind
        its end where nothing is.
        """
        begin = loading.get(state.request_id)
        for table, group in zip(state.tables, self._groups, strict=False):
            yield table, len(table) if begin is None else begin // group.block_size

    def _may_others_load(self, output: Any) -> bool:
        """Whether another connector (beside this one in a `MultiConnector`) may load in this
        step: nobody tells our worker if it fails.
        """
        if not getattr(output, "has_sync_kv_loads", True):  # since 0.29
            return False
        cached = output.scheduled_cached_reqs
        begun = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        begun += [
            known
            for known in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if known[0] in cached.resumed_req_ids
        ]
        states = (
            (self._states.get(request_id), num_computed) for request_id, num_computed in begun
        )
        return any(
            state is not None and num_computed > state.num_local for state, num_computed in states
        )

    def _stores(self, scheduled: Iterable[tuple[RequestState, int]]) -> Iterable[Store]:
        for state, num_tokens in scheduled:
            request = state.request
            num_known = (
                len(request.all_token_ids) if self._saves_decode else request.num_prompt_tokens
            )
            if num_tokens < self._chunk_size or not state.tables or self._namer.name(state) is None:
                continue
            if state.asked_at is not None:
                continue  # which of its chunks need no storing is known in one of the next steps
            runs = state.complete_runs(self._groups, self._chunk_size, min(num_tokens, num_known))
            if not runs or not self._namer.check(state):
                continue
            yield Store(
                state.request_id, tuple(runs), state.num_local if state.is_new else num_known
            )


def _first_in(blocks: set[int], table: Sequence[int]) -> int:
    """The place of a table's first block that is one of these; the table's length where none is."""
    return (
        len(table)
        if blocks.isdisjoint(table)
        else next(place for place, block in enumerate(table) if block in blocks)
    )
