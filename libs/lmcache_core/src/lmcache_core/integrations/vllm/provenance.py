"""Which of vLLM's blocks hold KV that this engine has computed or verified. Imports nothing of
vLLM.

vLLM says which tokens a block holds. Whether the bytes in it are the KV of these tokens is known of
a block while it is in the table of those who read it:

    handed out by vLLM -----> unknown ----- computed by a request that is known -----> known
                                 |  ^
             loaded by us, digests |  | handed out again
                          compared v  |
                                known -

A request is known if each block that it begins behind is, in every group: those of vLLM's prefix
cache, and those that were loaded. Nothing is stored of others. So nothing is stored of KV that
another connector loaded, or that a failed load should have brought, nor of what was computed from
it, even if vLLM's prefix cache offers it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_core.integrations.vllm.groups import NULL_BLOCK, CacheGroup
from lmcache_core.integrations.vllm.plan import Load
from lmcache_core.integrations.vllm.requests import Origin, RequestNamer, RequestState


class Provenance:
    """Follows where the content of vLLM's blocks comes from.

    Args:
        states: The requests by id; kept by their owner.
        namer: Knows the weights that requests are computed with.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        chunk_size: int,
        states: Mapping[str, RequestState],
        namer: RequestNamer,
    ) -> None:
        self._groups = tuple(groups)
        self._chunk_size = chunk_size
        self._states = states
        self._namer = namer
        self._known: dict[int, Origin] = {}
        """At most all of vLLM's blocks."""
        self._turns = itertools.count(1)

    def handed_out(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """Record the blocks that vLLM gives a waiting request: all but those of its prefix cache
        will be written to, also by a load that ends, or whose request ends, before a step uses
        them. A session that continues waits again, and nothing of its later turns is known: where
        a turn has ended among accepted drafts, vLLM 0.32 takes the rest of them for the begin of
        the next one.
        """
        state.turn = next(self._turns)
        for group in self._groups:
            self._note(block_ids[group.index][state.num_local // group.block_size :], None)

    def loaded(self, load: Load, state: RequestState, end: int) -> None:
        """Record that tokens `[load.begin, end)` of a request have been loaded and verified."""
        origin = self._namer.origin_of(state)
        for run in load.runs:
            size, start = self._groups[run.group].block_size, run.first * self._chunk_size
            first, last = -(-max(0, load.begin - start) // size), max(0, end - start) // size
            self._note(run.block_ids[first:last], origin)

    def follow(self, output: Any) -> None:
        """Record what a step (vLLM's `SchedulerOutput`) computes, in the order in which vLLM has
        planned it: a request may begin behind blocks that another one computes in the same step.
        """
        cached, begun = output.scheduled_cached_reqs, []
        for request_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._states.get(request_id)
            if request_id in cached.resumed_req_ids:
                begun.append((state, block_ids, num_computed))
            elif block_ids is not None:
                is_known = state is not None and self._namer.is_current(state)
                for group in self._groups:
                    self._note(block_ids[group.index], state.origin if state and is_known else None)
        begun += [
            (self._states.get(new.req_id), new.block_ids, new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ]
        for state, block_ids, num_computed in sorted(begun, key=lambda one: _turn_of(one[0])):
            origin = None if state is None else self._namer.origin_of(state)
            tables = [
                (block_ids[group.index], -(-num_computed // group.block_size))
                for group in self._groups
            ]
            if not all(
                block == NULL_BLOCK or self._known.get(block) == origin
                for table, end in tables
                for block in table[:end]
            ):
                origin = None
            if state is not None:
                state.origin = origin
            for table, end in tables:
                self._note(table[end:], origin)

    def forget(self) -> None:
        """Record that something was not followed: nothing is known any more."""
        self._known.clear()
        for state in self._states.values():
            state.origin = None

    def _note(self, blocks: Sequence[int], origin: Origin | None) -> None:
        if origin is None:
            for block in blocks:
                self._known.pop(block, None)
        else:
            self._known.update(dict.fromkeys(blocks, origin))


def _turn_of(state: RequestState | None) -> int:
    return 0 if state is None else state.turn
