"""The scheduler's side: what each request can load, and what each step loads and stores. Imports
nothing of vLLM.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lmcache_core.engine import ChunkStore
from lmcache_core.engine.prefill_rate import MIN_PREFILL_TOKENS, PrefillRate
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.identity import FMT, KVIdentity
from lmcache_core.integrations.vllm.options import ConnectorOptions
from lmcache_core.integrations.vllm.plan import Load, Store, WorkerReport, this_host
from lmcache_core.integrations.vllm.planned_stores import StorePlanner
from lmcache_core.integrations.vllm.requests import (
    Offer,
    RequestNamer,
    RequestState,
    Role,
    Wishes,
)
from lmcache_core.keys import CHUNK_HASH_BYTES, TAIL, ChunkChain
from lmcache_core.record import Staged, StagedFrom
from lmcache_core.telemetry import LOOKUP_SECONDS, Counters
from lmcache_core.telemetry.sparse_log import SparseLog

logger = logging.getLogger(__name__)

WAIT_S = 0.003
"""Longest wait of the scheduler for an answer: less than a step, since all requests wait. The
question is repeated in the next step.
"""
POLL_S = 0.002
"""vLLM asks about a waiting request in every step; the store is not asked more often than this."""
ASSUMED_TOKENS_PER_S = 50_000.0
"""Prefill rate of an engine that has computed nothing yet, about that of an 8B model on an H100: a
new engine waits a little for the store, too, not for the shortest time only.
"""
PATIENCE_MARGIN_S = 0.5
"""Extra time for the store, beyond its deadline, before a request continues with what is there."""

MAX_TIMED_STEPS = 64
"""More than vLLM ever has underway; a worker that is out reports no steps."""

WHOLE_OFFER_S = 60.0
PARTIAL_OFFER_S = 1.0
"""Lifetimes of offers: a request that has waited longer for its turn is looked up again."""

MAX_WINDOW_TRIES = 8
"""How often to try a shorter prefix when chunks of a window are missing."""
STATE_SEARCH = 4
"""There is recurrent state after few of the chunks: where it is missing, so many times as many
chunks are searched for it next.
"""
WINDOW_TICKET = "/window"


class SchedulerSide:
    """Answers vLLM's scheduler. Called by one thread.

    Args:
        store: The chunk store; opened and closed by its owner.
        namer: Names chunks; gets the salt as soon as the store knows it.
        counters: Counts what clients ask for in vain, and notes how long answers take.

    Attributes:
        step: Number of the last planned step if its duration measures prefill, else 0.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        groups: Sequence[CacheGroup],
        identity: KVIdentity,
        store: ChunkStore,
        namer: RequestNamer,
        counters: Counters,
        role: Role,
    ) -> None:
        self._counters = counters
        self._log = SparseLog(logger)
        self._role = role
        self._num_workers = identity.num_ranks * identity.replicas
        self._patience_s = options.engine.tier_timeout_s + PATIENCE_MARGIN_S
        self._groups = tuple(groups)
        self._chunk_size = options.engine.chunk_size
        self._block_size = max(group.block_size for group in groups)
        self._has_windows = any(group.window is not None for group in groups)
        self._offers = Offers(store, identity, groups, self._chunk_size)
        self._namer = namer
        self._states: dict[str, RequestState] = {}
        self._loads: dict[str, RequestState] = {}
        self.stores = StorePlanner(options, groups, self._states, namer, role)
        self._prefill = PrefillRate(options.engine.prefill_tokens_per_s)
        self.step = 0
        self._num_steps = 0
        self._timed: dict[int, tuple[int, float]] = {}
        self._last_ended = 0.0
        self._is_out = False
        self._held: list[str] = []

    def new_request(self, request: Any) -> None:
        """Let the store read what a new request needs while it is queued."""
        state = self._state_of(request)
        if state.may_load and self._role.loads:
            self._ask(state, wait_s=0.0)

    def num_matched(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond vLLM's own can be loaded, and whether asynchronously, which
        is always so; None if not known yet: ask again.
        """
        state = self._state_of(request)
        state.num_local = num_local
        may_load = state.may_load and self._role.loads
        if not may_load or state.is_loading or self._is_out:
            return 0, False
        if state.offer is not None:
            # Others may have stored more since, and the store keeps nothing forever.
            is_whole = state.names is not None and state.offer.num_chunks == state.names.num_chunks
            shelf_life_s = WHOLE_OFFER_S if is_whole else PARTIAL_OFFER_S
            if time.monotonic() - state.polled_at > shelf_life_s:
                self._end_offer(state)
        if self._loadable(state) < self._block_size:
            return 0, False  # vLLM has all of it: no answer is worth waiting for
        if state.offer is None:
            self._ask(state, wait_s=WAIT_S)
            if state.offer is None:
                return (None, False) if state.asked_at is not None else (0, False)
        num_offered = state.offer.num_chunks * self._chunk_size
        if state.offer.has_tail and state.tail is not None:
            num_offered = state.tail.end
        num_tokens = min(num_offered, self._limit_of(state)) - num_local
        return (num_tokens, True) if num_tokens >= self._block_size else (0, False)

    def allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external: int
    ) -> None:
        """Plan the load of `num_external` tokens into blocks that vLLM has given a request."""
        state = self._state_of(request)
        if state.is_loading:
            return  # the second call for a load brings nothing new
        self.stores.provenance.handed_out(state, block_ids)
        if num_external == 0:
            if state.offer is not None:
                self._end_offer(state)
            return
        assert state.offer is not None, "vLLM loads tokens that were not offered"
        state.set_blocks(block_ids, has_states=True)
        state.load = state.num_local, state.num_local + num_external
        state.num_local += num_external
        state.stored = [state.offer.num_chunks] * len(self._groups)
        state.is_loading = True
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
        """Return the loads for the workers to start in this step."""
        loads = []
        for state in self._loads.values():
            assert state.load is not None
            begin, end = state.load
            whole_blocks = -(-end // self._block_size) * self._block_size
            runs = tuple(state.load_runs(begin, end))
            state.load = None
            load = Load(state.request_id, begin, whole_blocks, runs, self.recompute_s)
            state.promised, state.loaded_end = load, whole_blocks
            loads.append(load)
        self._loads.clear()
        return tuple(loads)

    def waits_for_loads(self, output: Any) -> bool:
        """Return whether a step (vLLM's `SchedulerOutput`) computes nothing because all requests
        wait for loads.
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
        """
        for request_id in output.num_scheduled_tokens:
            state = self._states.get(request_id)
            if state is not None and state.asked_at is not None:
                # Already running: the answer only shows what need not be stored.
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
        return self.stores.plan(output)

    def step_done(self, report: WorkerReport | None, received: Iterable[str]) -> None:
        """Process the workers' report of a step.

        Args:
            report: Their report; None if there was nothing to report.
            received: Requests whose load has ended on all workers.
        """
        now, step = time.monotonic(), report.step if report is not None else 0
        if step in self._timed:
            # If steps overlap, this one began when the previous one ended, not when it was planned.
            num_tokens, planned_at = self._timed[step]
            self._prefill.note(num_tokens, now - max(planned_at, self._last_ended))
            self._timed = {later: timed for later, timed in self._timed.items() if later > step}
        self._last_ended = now
        if report is not None:
            elsewhere = report.hosts - {this_host()}
            if elsewhere:  # they use another sidecar than the one asked here
                logger.error(
                    "nothing is loaded, workers of this engine are on other hosts: host=%s"
                    " others=%s",
                    this_host(),
                    sorted(elsewhere),
                )
            self._is_out |= report.is_out or bool(elsewhere)
            for request_id in report.failed.keys() & self._states.keys():
                logger.warning("loading KV failed, recomputing: request=%s", request_id)
                # Another offer could fail again, endlessly. What is computed instead is stored
                # wherever it is missing.
                state = self._states[request_id]
                state.gave_up = True
                state.forget_offer()
                state.stored, state.is_tail_stored = [0] * len(self._groups), False
                state.loaded_end = min(state.loaded_end, report.failed[request_id])
        ended = list(received)
        for request_id in self._states.keys() & ended:
            state = self._states[request_id]
            state.is_loading = False
            state.forget_offer()
            if state.promised is None:
                # Another connector loaded (in a `MultiConnector`). If that failed, vLLM still keeps
                # the request's blocks back, and would wait for them for ever before a second load.
                state.gave_up = True
            else:
                self.stores.provenance.loaded(state.promised, state, state.loaded_end)
                state.promised = None
        self._offers.give_back(ended)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request that has ended or was aborted; return what the engine that decodes it
        needs to know.
        """
        state = self._states.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)
        if state is None:
            return None
        if not state.is_loading:
            self._offers.give_back([state.request_id])
        return state.wishes.handed_over(self._offers.instance, self._num_workers)

    def hold(self, request: Any) -> bool:
        """Return whether vLLM must keep the blocks of a request that has ended until every worker
        has named it in `finished_sending`.
        """
        is_held = self.stores.finished(request)
        if is_held:
            self._held.append(request.request_id)
        return is_held

    def take_held(self) -> tuple[str, ...]:
        """Return the requests whose blocks vLLM was asked to keep since the last call."""
        held, self._held = tuple(self._held), []
        return held

    def begin_epoch(self) -> None:
        """Stop using what was stored so far, and store nothing of what runs now: the weights may
        have been replaced.
        """
        self._namer.begin_epoch()
        for state in self._states.values():
            state.gave_up = state.is_outdated = True

    @property
    def recompute_s(self) -> float | None:
        """Cost of computing one chunk; None while unknown."""
        return self._prefill.recompute_s(self._chunk_size)

    def _state_of(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            wishes = Wishes.of(request, self._role, self._counters)
            if wishes.num_workers not in (0, self._num_workers):
                self._log.log(
                    logging.ERROR,
                    "nothing is handed over between engines of %d and %d workers, which name their"
                    " KV otherwise; give both the same tensor_parallel_size, or put the cache"
                    " behind vLLM's offloading (OffloadingConnector)",
                    wishes.num_workers,
                    self._num_workers,
                )
                wishes = replace(wishes, source=None)
            state = RequestState(request, self._groups, self._chunk_size, wishes=wishes)
            self._states[request.request_id] = state
        return state

    def _ask(self, state: RequestState, wait_s: float) -> None:
        """Ask the store what a request can load; its answer becomes `state.offer`, which is None
        while more may come.

        The first call sends the question; later calls collect its answer.
        """
        now = time.monotonic()
        if state.asked_at is not None and now - state.polled_at < POLL_S:
            return
        state.polled_at = now
        names = self._namer.name(state)
        is_prompt = state.request.num_tokens == state.request.num_prompt_tokens
        tail = state.tail.digest if state.tail is not None and is_prompt else b""
        if names is None or not (names.num_chunks or tail):
            state.asked_at = None
            return
        rate = self._prefill.tokens_per_s or ASSUMED_TOKENS_PER_S
        saving_s = self._loadable(state) / rate
        first_asked = state.asked_at if state.asked_at is not None else now
        is_late = now - first_asked > self._patience_s
        source = state.wishes.source if is_prompt else None
        wanted = Wanted(names.hashes, self._limit_of(state), tail, source)
        offer, is_final = self._offers.ask(
            state.request_id, wanted, self.recompute_s, wait_s, saving_s, is_late
        )
        if offer is None:
            state.polled_at = 0.0  # checking whether the answer has arrived costs nothing
        if is_final or is_late:
            self._counters.observe(LOOKUP_SECONDS, now - first_asked)
            # The offer's lifetime begins now, even if no answer has arrived.
            state.offer, state.asked_at, state.polled_at = offer or Offer(0), None, now
            state.stored = [max(stored, state.offer.num_chunks) for stored in state.stored]
        else:
            state.asked_at = first_asked

    def _limit_of(self, state: RequestState) -> int:
        """Return the limit on tokens that can be loaded.

        The forward pass needs one token. vLLM itself steps back by it after a load of the whole
        prompt, but a window then reaches back to a token whose block it has dropped.
        """
        return int(state.request.num_tokens) - self._has_windows

    def _loadable(self, state: RequestState) -> int:
        """Return how many tokens beyond vLLM's own could be loaded if all of its chunks were
        there.
        """
        num_whole = int(state.request.num_tokens) // self._chunk_size * self._chunk_size
        if state.tail is not None:
            num_whole = max(num_whole, state.tail.end)
        return min(num_whole, self._limit_of(state)) - state.num_local

    def _end_offer(self, state: RequestState) -> None:
        if state.offer is not None or state.asked_at is not None:
            state.forget_offer()
            self._offers.give_back([state.request_id])


@dataclass(frozen=True)
class Wanted:
    """The chunks that a request could load.

    Attributes:
        hashes: Hashes of its chunks, packed.
        num_tokens: Limit on its tokens that can be loaded.
        tail: Hash of its tail; empty: it has none, as with windowed groups.
        source: As for `ChunkStore.stage`.
    """

    hashes: bytes
    num_tokens: int
    tail: bytes = b""
    source: str | None = None


class Offers:
    """Asks the store what can be loaded. Never waits for a tier."""

    def __init__(
        self, store: ChunkStore, identity: KVIdentity, groups: Sequence[CacheGroup], chunk_size: int
    ) -> None:
        self._store = store
        # Another connector of this engine may ask the same store about the same requests.
        self._mark = f"{secrets.token_hex(4)}:"
        self._chain = partial(ChunkChain, FMT, identity.metadata.model_name, identity.num_ranks)
        self._chunk_size = chunk_size
        self._whole = [group for group in groups if group.window is None]
        self._windowed = [group for group in groups if group.window is not None]
        self._has_states = any(group.is_state for group in groups)
        self._open: set[str] = set()
        self._bounds: dict[str, tuple[bytes, _Bound]] = {}

    def ask(
        self,
        ticket: str,
        wanted: Wanted,
        recompute_s: float | None,
        wait_s: float | None = None,
        saving_s: float = 0.0,
        is_late: bool = False,
    ) -> tuple[Offer | None, bool]:
        """Return what is available of these chunks, and whether the answer is final. No offer while
        the store has not answered.

        Args:
            ticket: Identifies the request; ask again with it to follow the store's progress.
            recompute_s: Cost of computing one chunk; None if unknown.
            wait_s: As for `ChunkStore.stage`.
            saving_s: As for `ChunkStore.stage`.
            is_late: What is available now is taken, even if the answer is not final.
        """
        stage = partial(
            self._store.stage,
            recompute_s=recompute_s,
            wait_s=wait_s,
            saving_s=saving_s,
            source=wanted.source,
        )
        hashes = wanted.hashes
        self._open.add(ticket)
        # The windows depend on the length of the prefix, which is not asked again while the windows
        # take several calls.
        known, bound = self._bounds.pop(ticket, (b"", None))
        if bound is None or known != hashes:
            offer, is_final = self._of_whole_groups(stage, ticket, hashes, wanted.tail)
            if offer is None or not (is_final or is_late) or not self._windowed:
                return offer, is_final
            bound = _Bound(offer.origins, offer.num_chunks)
        offer, is_final = self._shortened_to_windows(
            stage, ticket, hashes, bound, wanted.num_tokens
        )
        if not is_final:
            self._bounds[ticket] = hashes, bound
        return offer, is_final

    @property
    def instance(self) -> str:
        """See `ChunkStore.instance`."""
        return self._store.instance

    def give_back(self, tickets: Collection[str]) -> None:
        """Release what these requests were offered; unknown tickets are ignored."""
        ours = [self._mark + ticket for ticket in tickets if ticket in self._open]
        self._open.difference_update(tickets)
        for ticket in tickets:
            self._bounds.pop(ticket, None)
        if ours:
            windows = [ticket + WINDOW_TICKET for ticket in ours if self._windowed]
            self._store.unstage([*ours, *windows])

    def _of_whole_groups(
        self, stage: Callable[..., Staged | None], ticket: str, hashes: bytes, tail: bytes
    ) -> tuple[Offer | None, bool]:
        num_asked = len(hashes) // CHUNK_HASH_BYTES
        if not self._whole:
            return Offer(num_asked), True
        named = [(group.name, hashes) for group in self._whole if hashes]
        tails = [(group.name + TAIL, tail) for group in self._whole if tail]
        staged = stage(
            self._mark + ticket, [self._chain(name, digests) for name, digests in named + tails]
        )
        if staged is None:
            return Offer(0), True
        if not staged.tiers:
            return None, False
        # The prefix ends where any group lacks a chunk. Its origin is the slowest one among the
        # groups.
        nowhere = bytes([StagedFrom.NOWHERE])
        tiers, of_tail = staged.tiers[: len(named)], staged.tiers[len(named) :]
        num_chunks = min((len(one.partition(nowhere)[0]) for one in tiers), default=0)
        origins = bytes(max(chunk) for chunk in zip(*tiers, strict=True))[:num_chunks]
        has_tail = bool(tail) and num_chunks == num_asked and nowhere not in of_tail
        if has_tail:
            origins += max(of_tail)
        return Offer(num_chunks, origins, has_tail), staged.is_ready

    def _shortened_to_windows(
        self,
        stage: Callable[..., Staged | None],
        ticket: str,
        hashes: bytes,
        bound: _Bound,
        num_tokens: int,
    ) -> tuple[Offer | None, bool]:
        """Return the longest prefix whose windows are available, too: a windowed group needs only
        the chunks that the next token attends to, and recurrent state only the last one.
        """
        if self._has_states:
            bound.num_chunks = min(bound.num_chunks, num_tokens // self._chunk_size)
        for _ in range(MAX_WINDOW_TRIES):
            if bound.num_chunks == 0:
                break
            end = min(bound.num_chunks * self._chunk_size, num_tokens)
            firsts = [
                max(0, bound.num_chunks - bound.num_searched)
                if group.is_state
                else group.first_needed_token(end) // self._chunk_size
                for group in self._windowed
            ]
            # At the end of a section, nothing of local attention is needed.
            asked = [
                (group, first)
                for group, first in zip(self._windowed, firsts, strict=True)
                if first < bound.num_chunks
            ]
            if not asked and self._whole:
                return bound.offer(bound.num_chunks), True
            if not asked:
                bound.num_chunks -= 1
                continue
            last = CHUNK_HASH_BYTES * bound.num_chunks
            chains = [
                self._chain(group.name, hashes[CHUNK_HASH_BYTES * first : last])
                for group, first in asked
            ]
            if bound.is_shorter:  # what is on its way has been waited for
                stage = partial(stage, source=None)
            staged = stage(self._mark + ticket + WINDOW_TICKET, chains, is_prefix=False)
            if staged is None:
                return Offer(0), True
            if not staged.tiers:
                return None, False
            longest = self._longest(bound.num_chunks, asked, staged.tiers)
            if longest == bound.num_chunks and bound.num_searched == 1:
                return bound.offer(longest), True
            if not staged.is_ready:
                return Offer(0), False
            is_found = longest > bound.num_chunks - bound.num_searched or not self._has_states
            bound.num_chunks, bound.is_shorter = longest, True
            bound.num_searched = 1 if is_found else bound.num_searched * STATE_SEARCH
        return Offer(0), True

    def _longest(
        self, num_chunks: int, asked: Sequence[tuple[CacheGroup, int]], tiers: Sequence[bytes]
    ) -> int:
        """Return the longest prefix of up to `num_chunks` that may be available.

        Args:
            asked: Windowed groups, and the first chunk asked about in each.
            tiers: Where each chunk from that one on is, by group.
        """
        nowhere = StagedFrom.NOWHERE
        # Every longer prefix, up to `num_chunks`, also has a missing chunk in its window.
        num_chunks = min(
            (
                first + places.find(nowhere)
                for (group, first), places in zip(asked, tiers, strict=True)
                if not group.is_state and nowhere in places
            ),
            default=num_chunks,
        )
        states = [
            (first, places)
            for (group, first), places in zip(asked, tiers, strict=True)
            if group.is_state
        ]
        lowest = max((first for first, _ in states), default=num_chunks)
        while num_chunks > lowest and any(
            places[num_chunks - 1 - first] == nowhere for first, places in states
        ):
            num_chunks -= 1
        return num_chunks


@dataclass
class _Bound:
    """What the windowed groups leave of an offer, while the answer takes several calls.

    Attributes:
        origins: `Offer.origins` of the whole groups; empty if there are none.
        num_chunks: Chunks, from the first, that may still be available.
        num_searched: Of these, how many of the last are searched for recurrent state.
        is_shorter: Whether chunks of a window have been missing.
    """

    origins: bytes
    num_chunks: int
    num_searched: int = 1
    is_shorter: bool = False

    def offer(self, num_chunks: int) -> Offer:
        origins = self.origins or bytes([StagedFrom.HOT]) * num_chunks
        return Offer(num_chunks, origins[:num_chunks])
