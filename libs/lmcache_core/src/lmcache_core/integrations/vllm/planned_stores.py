"""Plans what the workers store after a step, and from which blocks. Imports nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.options import ConnectorOptions
from lmcache_core.integrations.vllm.plan import Store
from lmcache_core.integrations.vllm.provenance import Provenance
from lmcache_core.integrations.vllm.requests import RequestNamer, RequestState, Role

logger = logging.getLogger(__name__)


class StorePlanner:
    """Follows vLLM's block tables from step to step, and finds the chunks that are complete.

    Args:
        states: The requests by id; kept by their owner.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        groups: Sequence[CacheGroup],
        states: Mapping[str, RequestState],
        namer: RequestNamer,
        role: Role,
    ) -> None:
        self._stores_prompts = role.stores_prompts
        self._chunk_size = options.engine.chunk_size
        has_states = any(group.is_state for group in groups)
        # With drafts, a state inside an answer may be that of tokens that are rejected later.
        self._saves_decode = options.engine.save_decode_cache and not has_states
        self._groups = tuple(groups)
        self._states = states
        self._namer = namer
        self.provenance = Provenance(groups, self._chunk_size, states, namer)
        self._has_windows = any(group.window is not None for group in groups)
        self._storing: dict[str, int] = {}
        """Requests of which something was planned to be stored, and how often vLLM had preempted
        each of them.
        """
        self._overwritten: set[str] = set()
        for group in groups:
            if group.first_needed_token(self._chunk_size - 1) >= group.block_size:
                logger.warning(
                    "chunks are longer than a sliding window, those of its layers that are not"
                    " computed in one step are not stored; set chunk_size to at most the window:"
                    " chunk_size=%d window=%d",
                    self._chunk_size,
                    group.window,
                )

    def plan(self, output: Any) -> tuple[Store, ...]:
        """Return what to store after a step (vLLM's `SchedulerOutput`)."""
        for request_id, num_preemptions in list(self._storing.items()):
            if self._states[request_id].request.num_preemptions != num_preemptions:
                self._overwritten.add(request_id)
                del self._storing[request_id]
        scheduled = self._follow(output)
        self.provenance.follow(output)
        stores = (self._store(state, num_tokens) for state, num_tokens in scheduled)
        planned = tuple(store for store in stores if store is not None)
        for store in planned:
            request = self._states[store.request_id].request
            self._storing[store.request_id] = request.num_preemptions
        return planned

    def take_overwritten(self) -> frozenset[str]:
        """Return the requests of which vLLM has taken blocks away since the last call, although
        these may not be copied yet.
        """
        overwritten, self._overwritten = frozenset(self._overwritten), set()
        return overwritten

    def finished(self, request: Any) -> bool:
        """Record that a request has ended; return whether vLLM must keep its blocks until the
        workers have copied them.
        """
        num_preemptions = self._storing.pop(request.request_id, None)
        if num_preemptions is None:
            return False
        has_blocks = bool(request.num_preemptions == num_preemptions)
        if self._has_windows or not has_blocks:  # blocks before a window are taken away at the end
            self._overwritten.add(request.request_id)
        return has_blocks

    def lose_track(self) -> None:
        """Record that planning failed half-way: the known block tables may be wrong, so nothing
        more is stored from them.
        """
        self.provenance.forget()
        for state in self._states.values():
            state.tables = []

    def _follow(self, output: Any) -> list[tuple[RequestState, int]]:
        """Update the block tables. Return each scheduled request with the number of its tokens that
        have KV after this step.
        """
        scheduled = []
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.set_blocks(new.block_ids)
                self._drop_blocks(state, new.num_computed_tokens)
                num_new = output.num_scheduled_tokens[new.req_id]
                scheduled.append((state, new.num_computed_tokens + num_new))
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._states.get(request_id)
            if state is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.set_blocks(block_ids)
            elif block_ids is not None and state.tables:
                state.add_blocks(block_ids)
            self._drop_blocks(state, num_computed)
            scheduled.append((state, num_computed + output.num_scheduled_tokens[request_id]))
        self._note_states(output)
        return scheduled

    def _note_states(self, output: Any) -> None:
        """Record the blocks that hold recurrent state at their end when this step has run."""
        offered = getattr(output, "kv_connector_block_state", None)
        if offered is None:
            return
        by_index = {group.index: group for group in self._groups if group.is_state}
        for request_id, boundaries in offered.boundary_state_offloads.items():
            for index, block_id, num_tokens in boundaries:
                if request_id in self._states and index in by_index:
                    self._states[request_id].add_state(by_index[index], block_id, num_tokens)

    def _drop_blocks(self, state: RequestState, num_computed: int) -> None:
        if state.drop_blocks(num_computed) and state.request_id in self._storing:
            self._overwritten.add(state.request_id)

    def _store(self, state: RequestState, num_tokens: int) -> Store | None:
        """Return what to store for a request; None if there is nothing (yet)."""
        is_short = num_tokens < self._chunk_size and not state.wishes.hands_over
        if is_short or not state.tables or state.origin is None:
            return None
        if state.wishes.skip_save or not (self._stores_prompts or self._saves_decode):
            return None
        if self._namer.name(state) is None:
            return None
        if state.asked_at is not None:
            return None  # which of its chunks are already stored is known in one of the next steps
        request = state.request
        if not self._stores_prompts:
            first = request.num_prompt_tokens // self._chunk_size
            state.stored = [max(stored, first) for stored in state.stored]
        num_known = len(request.all_token_ids) if self._saves_decode else request.num_prompt_tokens
        runs = state.complete_runs(min(num_tokens, num_known))
        tail = state.tail if state.wishes.hands_over and not state.is_tail_stored else None
        if tail is not None and num_tokens >= tail.end:
            state.is_tail_stored = True
            runs += state.tail_runs()
        if not runs or not self._namer.check(state):
            return None
        return Store(state.request_id, tuple(runs))
