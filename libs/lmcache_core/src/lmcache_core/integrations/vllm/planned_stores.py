"""What the workers are to store after a step, and from which blocks. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.naming import Namer
from lmcache_core.integrations.vllm.options import ConnectorOptions
from lmcache_core.integrations.vllm.plan import ChunkRun, Load, Store
from lmcache_core.integrations.vllm.requests import RequestState

OnStored = Callable[[RequestState, ChunkRun], None]


class StorePlanner:
    """Follows vLLM's block tables from step to step, and says which chunks are complete.

    Args:
        options: Options.
        groups: The cache groups.
        states: The requests, by vLLM's names; kept by their owner.
        namer: Names their chunks.
        num_workers: How many workers compute each step.

    Attributes:
        on_planned: Called with each run of chunks that is going to be stored.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        groups: Sequence[CacheGroup],
        states: Mapping[str, RequestState],
        namer: Namer,
        num_workers: int,
    ) -> None:
        self._chunk_size = options.engine.chunk_size
        self._saves_decode = options.engine.save_decode_cache
        self._groups = tuple(groups)
        self._states = states
        self._namer = namer
        self._num_workers = num_workers
        self.on_planned: OnStored | None = None

    def plan(self, output: Any, loads: Sequence[Load]) -> tuple[Store, ...]:
        """What to store after this step.

        Args:
            output: vLLM's `SchedulerOutput`.
            loads: The step's loads.
        """
        scheduled = list(self._scheduled(output))
        # A load that fails before the forward pass spoils what all workers compute in it, and only one of them may know.
        is_at_risk = self._num_workers > 1 and any(not load.is_async for load in loads)
        return () if is_at_risk or self._may_others_load(output) else tuple(self._stores(scheduled))

    def lose_track(self) -> None:
        """Planning has failed half-way: what is known of block tables may be wrong, and nothing more is stored from them."""
        for state in self._states.values():
            state.tables = []

    def _scheduled(self, output: Any) -> Iterable[tuple[RequestState, int]]:
        """Follow the block tables; each scheduled request, and how many of its tokens have KV after this step."""
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.set_blocks(self._groups, new.block_ids)
                state.drop_blocks(self._groups, new.num_computed_tokens)
                yield state, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            state = self._states.get(request_id)
            if state is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.set_blocks(self._groups, block_ids)
            elif block_ids is not None and state.tables:
                state.add_blocks(self._groups, block_ids)
            state.drop_blocks(self._groups, num_computed)
            yield state, num_computed + output.num_scheduled_tokens[request_id]

    def _may_others_load(self, output: Any) -> bool:
        """Whether another connector (beside this one in a `MultiConnector`) may load in this step: nobody tells our worker if it fails."""
        if not getattr(output, "has_sync_kv_loads", True):  # since 0.29
            return False
        cached = output.scheduled_cached_reqs
        begun = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        begun += [known for known in zip(cached.req_ids, cached.num_computed_tokens, strict=True) if known[0] in cached.resumed_req_ids]
        states = ((self._states.get(request_id), num_computed) for request_id, num_computed in begun)
        return any(state is not None and num_computed > state.num_local for state, num_computed in states)

    def _stores(self, scheduled: Iterable[tuple[RequestState, int]]) -> Iterable[Store]:
        for state, num_tokens in scheduled:
            request = state.request
            num_known = len(request.all_token_ids) if self._saves_decode else request.num_prompt_tokens
            if num_tokens < self._chunk_size or not state.tables or self._namer.name(state) is None:
                continue
            runs = state.complete_runs(self._groups, self._chunk_size, min(num_tokens, num_known))
            if not runs or not self._namer.check(state):
                continue
            if self.on_planned is not None:
                for run in runs:
                    self.on_planned(state, run)
            yield Store(state.request_id, tuple(runs))
