"""The scheduler's side: what each request can load, what is to be stored after each step.
Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from lmcache_core.engine import ChunkStore
from lmcache_core.engine.prefill_rate import MIN_PREFILL_TOKENS, PrefillRate
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.identity import KVIdentity, Roots
from lmcache_core.integrations.vllm.offers import Offer, Offers
from lmcache_core.integrations.vllm.options import ConnectorOptions
from lmcache_core.integrations.vllm.plan import Load, Store, WorkerReport, this_host
from lmcache_core.integrations.vllm.planned_stores import StorePlanner
from lmcache_core.integrations.vllm.requests import RequestNamer, RequestState

logger = logging.getLogger(__name__)

WAIT_S = 0.003
"""Longest wait of the scheduler for an answer that others wait for as well: less than a step takes.
Then the request is asked about again in the next step.
"""
POLL_S = 0.002
"""A request that waits for a lift is asked about in every step; the store not more often than
this.
"""
PATIENCE_MARGIN_S = 0.5
"""What the store may take beyond its own deadline before a request goes on with what is there."""

MAX_TIMED_STEPS = 64
"""More than vLLM has under way at once; a worker that is out reports none."""

WHOLE_OFFER_S = 60.0
PARTIAL_OFFER_S = 1.0
"""A request that has waited longer for its turn is looked up again."""


class SchedulerSide:
    """Answers vLLM's scheduler. Called by one thread.

    Args:
        options: Options.
        groups: The cache groups.
        identity: What the KV is.
        store: The chunk store; opened and closed by its owner.
        roots: Roots of chunk names; knows the salt once the store does.

    Attributes:
        stores: Plans what is stored after each step.
        step: Number of the step that was planned last, if it tells of a prefill's rate, else 0.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        groups: Sequence[CacheGroup],
        identity: KVIdentity,
        store: ChunkStore,
        roots: Roots,
    ) -> None:
        self._options = options
        self._groups = tuple(groups)
        self._chunk_size = options.engine.chunk_size
        self._block_size = max(group.block_size for group in groups)
        self._has_windows = any(group.window is not None for group in groups)
        self._offers = Offers(store, identity, groups, self._chunk_size)
        self._roots = roots
        self._namer = RequestNamer(roots, self._chunk_size, identity.contents)
        self._states: dict[str, RequestState] = {}
        self.stores = StorePlanner(
            options, groups, self._states, self._namer, identity.num_ranks * identity.replicas
        )
        self._loads: dict[str, RequestState] = {}
        self._prefill = PrefillRate(options.engine.prefill_tokens_per_s)
        self.step = 0
        self._num_steps = 0
        self._timed: dict[int, tuple[int, float]] = {}
        self._last_ended = 0.0
        self._is_out = False

    def new_request(self, request: Any) -> None:
        """Begin to lift what a new request needs while it waits for its turn."""
        state = self._state_of(request)
        if state.may_load:
            self._ask(state, wait_s=0.0)

    def num_matched(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond vLLM's own can be loaded, and whether asynchronously; None:
        not known yet, ask again.
        """
        state = self._state_of(request)
        state.num_local = num_local
        if not state.may_load or state.is_loading or self._is_out:
            return 0, False
        if state.offer is not None and time.monotonic() - state.polled_at > self._shelf_life_s(
            state
        ):
            self._end_offer(state)
        if self._loadable(state) < self._block_size:
            return 0, False  # vLLM has all of it: not worth waiting for an answer
        if state.offer is None:
            self._ask(state, wait_s=WAIT_S)
            if state.offer is None:
                return (None, False) if state.asked_at is not None else (0, False)
        num_tokens = (
            min(state.offer.num_chunks * self._chunk_size, self._limit_of(state)) - num_local
        )
        if num_tokens < self._block_size:
            return 0, False
        return num_tokens, self._options.is_async

    def allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int
    ) -> None:
        """Plan the load of `num_external` tokens into blocks that vLLM has given a request."""
        state = self._state_of(request)
        if state.is_loading:
            return  # the second call for an asynchronous load: nothing new
        if num_external == 0:
            if state.offer is not None:
                self._end_offer(state)
            return
        assert state.offer is not None, "tokens that nobody offered are to be loaded"
        state.set_blocks(self._groups, block_ids)
        state.load = (state.num_local, state.num_local + num_external)
        state.num_local += num_external
        state.stored = [state.offer.num_chunks] * len(self._groups)
        state.is_loading = self._options.is_async
        self._loads[state.request_id] = state

    def origins_of(self, request: Any, num_external: int) -> dict[int, int]:
        """Return how many of the tokens to load come from where, by the values of `StagedFrom`."""
        state = self._states.get(request.request_id)
        if state is None or state.offer is None or state.load is None:
            return {}
        counts: dict[int, int] = {}
        begin, end = state.load[0], state.load[0] + num_external
        for i, origin in enumerate(state.offer.origins):
            tokens = min(end, (i + 1) * self._chunk_size) - max(begin, i * self._chunk_size)
            if tokens > 0:
                counts[origin] = counts.get(origin, 0) + tokens
        return counts

    def plan_loads(self) -> tuple[Load, ...]:
        """Return what the workers load in this step, or begin to."""
        loads = tuple(self._planned_load(state) for state in self._loads.values())
        self._loads.clear()
        return loads

    def waits_for_loads(self, output: Any) -> bool:
        """Return whether a step (vLLM's `SchedulerOutput`) computes nothing because all requests
        wait for asynchronous loads.
        """
        states = self._states.values()
        return (
            not output.total_num_scheduled_tokens
            and bool(states)
            and all(state.is_loading for state in states)
        )

    def plan_stores(self, output: Any, loads: Sequence[Load]) -> tuple[Store, ...]:
        """Return what the workers store after this step.

        Args:
            output: vLLM's `SchedulerOutput`.
            loads: The step's loads.
        """
        for request_id in output.num_scheduled_tokens:
            state = self._states.get(request_id)
            if state is not None and state.asked_at is not None:
                # It runs already: the answer only says what need not be stored.
                self._ask(state, wait_s=0.0)
                if state.offer is not None:
                    self._end_offer(state)
        num_tokens = output.total_num_scheduled_tokens
        self._num_steps += 1
        self.step = self._num_steps if num_tokens >= MIN_PREFILL_TOKENS and not loads else 0
        if self.step:
            self._timed[self.step] = num_tokens, time.monotonic()
            if len(self._timed) > MAX_TIMED_STEPS:
                del self._timed[next(iter(self._timed))]
        return self.stores.plan(output, loads)

    def step_done(self, report: WorkerReport | None, received: Iterable[str]) -> None:
        """Take the workers' report of a step.

        Args:
            report: Their report; None when there was nothing to say.
            received: Requests whose asynchronous load is over, on all workers.
        """
        self._note_rate(report.step if report is not None else 0)
        over = list(report.loaded) if report is not None else []
        for request_id in received:
            over.append(request_id)
            state = self._states.get(request_id)
            if state is not None:
                state.is_loading = False
                state.forget_offer()
        if report is not None:
            self._is_out |= report.is_out or self._has_workers_elsewhere(report)
            if report.failed & report.loaded:
                self.stores.load_failed()
            for request_id in report.failed:
                self._give_up(request_id)
        self._offers.give_back(over)

    def _has_workers_elsewhere(self, report: WorkerReport) -> bool:
        """Return whether a worker is in another pod or on another node, where it has another
        sidecar than the one that is asked here.
        """
        elsewhere = report.hosts - {this_host()}
        if elsewhere:
            logger.error(
                "nothing is loaded, workers of this engine are on other hosts: host=%s others=%s",
                this_host(),
                sorted(elsewhere),
            )
        return bool(elsewhere)

    def finished(self, request: Any) -> None:
        """Forget a request that has ended, or was aborted."""
        state = self._states.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)
        if state is not None and not state.is_loading:
            self._offers.give_back([state.request_id])

    def begin_epoch(self) -> None:
        """Ask for nothing that was stored so far, and store nothing that runs now: the weights may
        have been replaced.
        """
        self._roots.begin_epoch()
        for state in self._states.values():
            state.gave_up = state.is_outdated = True

    @property
    def recompute_s(self) -> float | None:
        """What computing one chunk costs; None while that is not known."""
        return self._prefill.recompute_s(self._chunk_size)

    def _state_of(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            state = RequestState(request, stored=[0] * len(self._groups))
            self._states[request.request_id] = state
        return state

    def _ask(self, state: RequestState, wait_s: float) -> None:
        """Ask the store for what a request can load; its answer is `state.offer`, or None while
        more may come.

        The first call sends the question, and those that follow collect its answer.
        """
        now = time.monotonic()
        if state.asked_at is not None and now - state.polled_at < POLL_S:
            return
        state.polled_at = now
        names = self._namer.name(state)
        if names is None or not names.hashes:
            state.asked_at = None
            return
        saving_s = self._prefill.recompute_s(self._loadable(state)) or 0.0
        offer, is_final = self._offers.ask(
            state.request_id,
            names.hashes,
            self._limit_of(state),
            self.recompute_s,
            wait_s,
            saving_s,
        )
        if offer is None:
            state.polled_at = 0.0  # to look whether the answer has come costs nothing
        first_asked = state.asked_at if state.asked_at is not None else now
        if is_final or now - first_asked > self._options.engine.tier_timeout_s + PATIENCE_MARGIN_S:
            # Its shelf life begins now, also where no answer has come.
            state.offer, state.asked_at, state.polled_at = offer or Offer(0), None, now
            state.is_new = state.offer.is_complete
            state.stored = [max(stored, state.offer.num_chunks) for stored in state.stored]
        else:
            state.asked_at = first_asked

    def _limit_of(self, state: RequestState) -> int:
        """How many tokens can be loaded at most: the forward pass needs one.

        In an asynchronous load vLLM itself steps back by that one, but a window then reaches back
        to a token whose block it has dropped.
        """
        return int(state.request.num_tokens) - (
            0 if self._options.is_async and not self._has_windows else 1
        )

    def _loadable(self, state: RequestState) -> int:
        """How many tokens could be loaded if all of its chunks were there, beyond those that
        vLLM has itself.
        """
        return (
            min(
                int(state.request.num_tokens) // self._chunk_size * self._chunk_size,
                self._limit_of(state),
            )
            - state.num_local
        )

    def _shelf_life_s(self, state: RequestState) -> float:
        """How long an offer is good: others may have stored more meanwhile, or the store may
        keep it no longer.
        """
        assert state.offer is not None
        is_whole = state.names is not None and state.offer.num_chunks == len(state.names.hashes)
        return WHOLE_OFFER_S if is_whole else PARTIAL_OFFER_S

    def _end_offer(self, state: RequestState) -> None:
        if state.offer is not None or state.asked_at is not None:
            state.forget_offer()
            self._offers.give_back([state.request_id])

    def _planned_load(self, state: RequestState) -> Load:
        assert state.load is not None
        begin, end = state.load
        whole_blocks = -(-end // self._block_size) * self._block_size
        runs = state.load_runs(self._groups, self._chunk_size, begin, end)
        state.load = None
        if not state.is_loading:
            state.forget_offer()
        return Load(
            state.request_id, begin, whole_blocks, tuple(runs), state.is_loading, self.recompute_s
        )

    def _note_rate(self, step: int) -> None:
        """A step has ended. Where steps overlap it began when the one before had ended, not when
        it was planned.
        """
        now = time.monotonic()
        if step in self._timed:
            num_tokens, planned_at = self._timed[step]
            self._prefill.note(num_tokens, now - max(planned_at, self._last_ended))
            self._timed = {later: timed for later, timed in self._timed.items() if later > step}
        self._last_ended = now

    def _give_up(self, request_id: str) -> None:
        """Offer nothing more to a request whose load failed: that could repeat without end.

        What it computes instead is stored again where it is missing.
        """
        state = self._states.get(request_id)
        if state is not None:
            logger.warning("loading KV failed, recomputing: request=%s", request_id)
            state.gave_up, state.is_new = True, False
            state.forget_offer()
            state.stored = [0] * len(self._groups)
