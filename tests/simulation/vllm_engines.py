"""vLLM in the simulation: both sides of the connector, and a model of vLLM's scheduler."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

from lmcache_core.integrations.vllm.requests import SOURCE
from lmcache_core.integrations.vllm.scheduler import WINDOW_TICKET
from lmcache_core.keys import TAIL

from tests.chaos.cluster.worker import (
    BOUND_S,
    BRANCH_CHUNKS,
    CHUNK_SIZE,
    HEAD_CHUNKS,
    MAX_TAIL_CHUNKS,
    NUM_BRANCHES,
    NUM_FAMILIES,
    PREFILL_TOKENS_PER_S,
    TIMEOUT_S,
    prompt_of,
)
from tests.fixtures.chains import keys_of_rank
from tests.fixtures.fake_vllm import imported_connector
from tests.fixtures.vllm_engine import Engine, GroupShape, Limits, Request, Shape, local
from tests.fixtures.vllm_engine.memory import POISON
from tests.fixtures.vllm_engine.shapes import STATE_KIND
from tests.fixtures.vllm_engine.stores import WrappedStore
from tests.fixtures.vllm_engine.workers import Worker
from tests.fixtures.vllm_engine.worlds import embedded, make_model, with_sidecar
from tests.simulation.cluster import worker_name
from tests.simulation.engines import SimulatedEngine
from tests.simulation.kernel import Kernel, Process, Thread
from tests.simulation.promises import instead_of
from tests.simulation.routers import Router

SHARED_TOKENS = (HEAD_CHUNKS + BRANCH_CHUNKS) * CHUNK_SIZE
NUM_LAYERS = 8
PLAIN = Shape((GroupShape(num_layers=NUM_LAYERS),), block_size=CHUNK_SIZE // 2)
TWO_RANKS = replace(PLAIN, num_ranks=2)
WITH_LOCAL = replace(PLAIN, groups=(*PLAIN.groups, local(2 * CHUNK_SIZE, NUM_LAYERS)))
WITH_STATE = Shape(
    (*PLAIN.groups, GroupShape(STATE_KIND, 2, NUM_LAYERS)), CHUNK_SIZE, zeroes_early=True
)
SHAPES = (TWO_RANKS, WITH_LOCAL, PLAIN, PLAIN, WITH_STATE, TWO_RANKS, PLAIN)
"""Those of a run's engines, of which it draws one."""
NUM_BLOCKS = {PLAIN: (26, 40), TWO_RANKS: (26, 40), WITH_LOCAL: (48, 60), WITH_STATE: (17, 26)}
"""An engine's memory holds one prompt or two, so that requests are preempted."""
MAX_AT_ONCE = {PLAIN: 4, TWO_RANKS: 4, WITH_LOCAL: 2, WITH_STATE: 4}
"""With local attention, vLLM reserves too little for requests that load: three can wait for each
other's blocks forever.
"""
LIMITS = Limits(token_budget=128, reserves_whole_prompt=False)
MAX_NEW_TOKENS = (8, 24)
STEP_S = 0.02
LATE_CHANCE, MAX_LATE_S = 0.3, 10 * STEP_S
LOSS_CHANCE, RESET_CHANCE, REPEAT_CHANCE = 0.05, 0.4, 0.5
PREFILL_CHANCE, DECODE_CHANCE = 0.2, 0.25
"""How often a proxy has a prompt computed for another engine, and one decoded that was computed."""
NOTICE_S = 0.5
"""After the death of a worker, its engine and the other workers run for this time."""
END_S = 60.0
"""Requests that are served at once have ended after this time, times when paused left out."""
CALLS = (
    "build_connector_meta", "get_num_new_matched_tokens", "get_transfer_results",
    "handle_preemptions", "on_new_request", "request_finished", "request_finished_all_groups",
    "start_load_kv", "update_connector_output", "update_state_after_alloc", "wait_for_save",
)  # fmt: skip
"""Calls of the connector that are timed."""
ASKING = ("get_num_new_matched_tokens", "start_load_kv", "wait_for_save")
"""Those behind which a sidecar is asked."""


def draw_shape(dice: random.Random) -> Shape:
    """Return the shape of all engines of a run."""
    return dice.choice(SHAPES)


_opened = contextlib.ExitStack()
"""Never closed: reports of workers are pickled, which looks up the connector's modules by name."""


@functools.cache
def _connector() -> ModuleType:
    """Return the connector's module, after installing a permanent stand-in for vLLM."""
    module = _opened.enter_context(imported_connector())
    from lmcache_core.integrations.vllm.worker import WorkerSide

    open_store, scheduler_side = module.open_store, module.SchedulerSide

    def open_wrapped(*args: Any) -> Any:
        # For good: engines that begin at the same time would undo each other's replacement.
        opened = open_store(*args)
        opened.store = _Store(opened.store, _clients[os.getpid()])
        return opened

    def scheduler_noted(options: Any, groups: Any, identity: Any, *others: Any) -> Any:
        _, namer, *_ = others
        _clients[os.getpid()].named_by = groups, identity, namer
        return scheduler_side(options, groups, identity, *others)

    @instead_of(WorkerSide, "_result")
    def result_judged(result: Any, side: Any, load: Any, first_bad: int | None) -> Any:
        """Blocks before the first chunk that is missing are not reported."""
        found, books = result(side, load, first_bad), _clients[os.getpid()]
        block_size = books.engine.shape.block_size
        num_loaded = books.loaded.pop(threading.get_ident(), 0)
        num_blocks = 0 if load.runs[-1].is_tail else num_loaded * CHUNK_SIZE // block_size
        if loaded := found.bad_blocks.intersection(load.runs[0].block_ids[:num_blocks]):
            books.engine.faults.append(f"error: {len(loaded)} loaded blocks count as missing")
        return found

    module.open_store = open_wrapped  # type: ignore[attr-defined]
    module.SchedulerSide = scheduler_noted  # type: ignore[attr-defined]
    return module


@dataclass
class _Books:
    """What the store has told an engine.

    Attributes:
        engine: The engine.
        kept: Chunks that are kept for requests, each its group and its hash, by ticket.
        loaded: How many chunks each thread has loaded last.
        named_by: Groups, identity and namer of the connector's scheduler; None: it has none.
    """

    engine: SimulatedEngine
    kept: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    named_by: tuple[Any, Any, Any] | None = None

    def keeps(self, request_id: str, group: str, hashes: Sequence[str]) -> bool:
        """Return whether the store keeps these chunks of a group for a request."""
        kept = set[tuple[str, str]]()
        for ticket, chunks in self.kept.items():
            if ticket.removesuffix(WINDOW_TICKET).endswith(f":{request_id}"):
                kept |= chunks
        return {(group, one) for one in hashes} <= kept


class _Store(WrappedStore):
    """Has room for chunks, which are copied then, some steps late now and then, and lacks the last
    chunks of a load now and then.

    Args:
        inner: The store.
        books: Those of its engine.
    """

    def __init__(self, inner: Any, books: _Books) -> None:
        super().__init__(inner)
        self._dice = random.Random(books.engine.seed + os.getpid())
        self._books = books
        self._rejected: dict[int, Any] = {}

    def stage(self, ticket: str, chains: Sequence[Any], **options: Any) -> Any:
        staged = self.inner.stage(ticket, chains, **options)
        if staged is not None and staged.tiers:
            self._books.kept[ticket] = {
                (chain.group, key.chunk_hash) for chain in chains for key in keys_of_rank(chain, 0)
            }
        return staged

    def unstage(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self._books.kept.pop(ticket, None)
        self.inner.unstage(tickets)

    def get(self, keys: Sequence[Any], *args: Any, **options: Any) -> Any:
        self._books.loaded.pop(threading.get_ident(), None)
        if self._dice.random() < LOSS_CHANCE:
            keys = keys[: self._dice.randrange(len(keys))]
        return self.inner.get(keys, *args, **options) if keys else []

    def release(self, chunks: Sequence[Any]) -> bool:
        were_held: bool = self.inner.release(chunks)
        rejected = self._rejected.pop(threading.get_ident(), None)
        number = next((i for i, chunk in enumerate(chunks) if chunk is rejected), len(chunks))
        self._books.loaded[threading.get_ident()] = number if were_held else 0
        return were_held

    def reject(self, chunk: Any) -> None:
        self._rejected[threading.get_ident()] = chunk
        self.inner.reject(chunk)

    def reserve(self, *args: Any) -> Any:
        if self._dice.random() < LATE_CHANCE:
            time.sleep(self._dice.uniform(0.0, MAX_LATE_S))
        return self.inner.reserve(*args)


_clients: dict[int, _Books] = {}
"""By process."""


class _WorkerProcess:
    """A worker in its own process, as vLLM has them with several ranks. It ends with the engine's
    process, and that with it.

    Args:
        kernel: The kernel.
        name: The process's name.
        make: Makes the worker.
        is_started: Called with the process before it runs.
    """

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        make: Callable[[], Worker],
        is_started: Callable[[Process], object],
    ) -> None:
        assert kernel.process is not None
        self._kernel = kernel
        self._engine = kernel.process
        self._thread: Thread | None = None
        self._caller: Thread | None = None
        self._tasks: list[Callable[[], Any]] = []
        self._results: list[Any] = []
        self._is_closed = False
        self._process = kernel.start_process(name, self._engine.machine, self._serve)
        is_started(self._process)
        kernel.spawn(self._engine, "monitor", self._watch)
        self._worker: Worker = self.call(make)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def call(self, task: Callable[[], Any]) -> Any:
        """Run a task in the process; return its result."""
        self.begin(task)
        return self.result()

    def begin(self, task: Callable[[], Any]) -> None:
        """Let the process run a task."""
        self._tasks.append(task)
        self._wake(self._thread)

    def result(self) -> Any:
        """Await the result of the last task."""
        self._caller = self._kernel.current
        while not self._results:
            self._kernel.block(None)
        result = self._results.pop()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Shut it down."""
        self.call(self._worker.close)
        self._is_closed = True
        self._wake(self._thread)
        self._kernel.wait_process(self._process)

    def _serve(self) -> int:
        assert self._kernel.current is not None
        self._thread = self._kernel.current
        self._engine.watchers.append(self._thread)
        while True:
            while not (self._tasks or self._is_closed or self._engine.is_dead):
                self._kernel.block(None)
            if self._is_closed or self._engine.is_dead:
                return 0
            try:
                result = self._tasks.pop()()
            except Exception as exc:
                result = exc
            self._results.append(result)
            self._wake(self._caller)

    def _wake(self, thread: Thread | None) -> None:
        if thread is not None:
            self._kernel.wake(thread)

    def _watch(self) -> None:
        self._kernel.wait_process(self._process)
        if not self._is_closed:
            self._kernel.sleep(NOTICE_S)
            self._kernel.end_process(self._engine, 1)


class _Engine(Engine):
    """An engine whose steps take time, and whose workers have their own processes if there are
    several.

    Args:
        client: Whose engine it is.
        *args: As for `Engine`.
    """

    def __init__(self, client: VllmClient, *args: Any, **options: Any) -> None:
        self._client = client
        super().__init__(*args, **options)

    def start_worker(self, rank: int, make: Callable[[], Worker]) -> Any:
        if self.shape.num_ranks == 1:
            return self._client.judged(make())
        return self._client.start_worker(rank, make)

    def call_workers(self, name: str, output: Any) -> list[Any]:
        if self.shape.num_ranks == 1:
            return super().call_workers(name, output)
        workers: Any = self.workers
        for worker in workers:
            worker.begin(functools.partial(getattr(worker, name), output))
        return [worker.result() for worker in workers]

    def compute(self, output: SimpleNamespace) -> Mapping[str, str]:
        self._check_copied(output)
        spoiled = super().compute(output)
        time.sleep(STEP_S + output.total_num_scheduled_tokens / PREFILL_TOKENS_PER_S)
        return spoiled

    def _check_copied(self, output: SimpleNamespace) -> None:
        """Check that no block that a step writes to is still to be copied."""
        size = self.shape.block_size
        written = {
            block
            for run in self._runs(output)
            for group, ids in zip(self.shape.groups, run.block_ids, strict=True)
            for block in ids[
                (run.last - 1 if group.is_state else run.first) // size : -(-run.last // size)
            ]
        }
        for worker in self.workers:
            for pending in () if worker.stores is None else worker.stores._pending:
                if pending.is_copied or pending.is_given_up:
                    continue
                blocks = {block for run in pending.store.runs for block in run.block_ids}
                if both := sorted(blocks & written):
                    raise AssertionError(
                        f"a step overwrites blocks {both} of {pending.store.request_id}, which are"
                        " not copied"
                    )


class VllmClient:
    """An engine process: vLLM's scheduler and its worker.

    Args:
        engine: The engine, whose faults and totals are updated.
        process: The simulated process.

    Attributes:
        books: Those of its store.
    """

    def __init__(self, engine: SimulatedEngine, process: Process) -> None:
        self._simulated = engine
        self._process = process
        self._processes = [process]
        self._seed = engine.seed
        self._dice = random.Random(engine.seed)
        self._num_tails = 0
        self._max_new_tokens = self._dice.choice(MAX_NEW_TOKENS)
        self._last_prompt: list[int] = []
        self._prefilled = engine.cluster.prefilled[engine.cluster.tenant_of(engine.node)]
        self._answered_s = 0.0
        self._engine = self._open()

    def request(self) -> None:
        """Serve a few requests at once; some clients disconnect before the end, or all that run
        are preempted.
        """
        dice = self._dice
        num_requests = dice.randint(1, MAX_AT_ONCE[self._simulated.shape])
        requests = [self._next_request() for _ in range(num_requests)]
        aborted = [one for one in requests if dice.random() < 0.1]
        self._serve(requests, aborted, dice.randint(1, 16), dice.random() < RESET_CHANCE)
        totals = self._simulated.totals
        totals["given_up"] += len(aborted)
        for request in requests:
            if request.handed_over is not None:
                totals["prefilled"] += 1
                self._prefilled.append((request.prompt_token_ids, self._relayed(request)))
            if request not in aborted and request.request_id in self._engine.scheduler.tallies:
                tally = self._engine.tally(request)
                totals["requests"] += 1
                totals["wanted"] += SHARED_TOKENS
                totals["hit"] += min(tally.num_local + tally.num_external, SHARED_TOKENS)
                totals["loaded"] += tally.num_external
                totals["preempted"] += request.num_preemptions
        self._forget(requests, dice.random() < 0.5)

    def _next_request(self) -> Request:
        """Add a client's request, or one of the two that a proxy makes of it."""
        dice, fate = self._dice, self._dice.random()
        num_tokens, transfer = dice.randint(1, self._max_new_tokens), None
        if fate < PREFILL_CHANCE:
            prompt, num_tokens = self._prompt(), 1
            transfer = dice.choice([{"do_remote_decode": True}, {"remote_decoder": {"id": "1"}}])
        elif fate < PREFILL_CHANCE + DECODE_CHANCE and self._prefilled:
            prompt, transfer = dice.choice(self._prefilled)
            self._simulated.totals["decoded"] += 1
        else:
            prompt = self._prompt()
        return self._engine.add(prompt, num_tokens, transfer=transfer)

    def _relayed(self, request: Request) -> Any:
        """Return what a proxy passes on of a prompt that was computed."""
        named = {"remote_prefiller": {"remote_host": self._simulated.node}}
        lost = {"do_remote_prefill": True, SOURCE: "nowhere"}
        return self._dice.choice([request.handed_over, request.handed_over, named, lost, None])

    def find(self, family: int) -> int:
        """Ask for the first prompt of a family plus one token, after a shorter one; vLLM stores
        both.
        """
        self._forget((), True)
        prompt, num_found = prompt_of(family, 0, 0, 0).tolist(), 0
        for num_tokens in (HEAD_CHUNKS * CHUNK_SIZE, len(prompt)):
            began_s, paused_s = time.monotonic(), self._paused_s
            request = self._engine.add([*prompt[:num_tokens], 1])
            self._serve([request])
            waited_s = self._answered_s - began_s - (self._paused_s - paused_s)
            if waited_s > TIMEOUT_S:
                self._simulated.faults.append(f"late: an offer came after {waited_s:.2f} s")
            tally = self._engine.scheduler.tallies.get(request.request_id)
            self._forget([request], True)
            num_found = 0 if tally is None else tally.num_external
        return num_found

    def close(self) -> None:
        """Check that nothing is left of any request, and shut down."""
        self._checked("idle", self._engine.check_idle)
        if self._router is not None:
            self._simulated.faults += self._router.check()
            self._router.close()
        self._engine.close()

    def _open(self) -> _Engine:
        cluster, node = self._simulated.cluster, self._simulated.node
        place = cluster.world.place(cluster.machines[node])
        options = {
            "chunk_size": CHUNK_SIZE,
            "prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
            "tier_timeout_s": TIMEOUT_S,
        }
        if self._simulated.is_embedded:
            extra = embedded(**options, **cluster.embedded(node))
        else:
            extra = with_sidecar(cluster.socket(node), **options)
        shape = self._simulated.shape
        self.books = _clients[self._process.pid] = _Books(self._simulated)
        engine = _Engine(
            self,
            _connector(),
            make_model(place),
            extra,
            replace(shape, num_blocks=self._dice.choice(NUM_BLOCKS[shape])),
            LIMITS,
            engine_id=f"engine-{self._seed}",
        )
        # What the connector cannot see: with it, a hit across tenants is wrong KV.
        engine.model.weights += f" of {cluster.tenant_of(node)}"
        has_router = cluster.world.pace.has_routers and not self._simulated.is_embedded
        named_by = self.books.named_by if has_router else None
        self._router = None if named_by is None else Router(extra, *named_by)
        self._time_calls(engine.connector)
        return engine

    def start_worker(self, rank: int, make: Callable[[], Worker]) -> _WorkerProcess:
        """Start a worker in its own process."""
        cluster, engine = self._simulated.cluster, self._process.name

        def is_started(process: Process) -> None:
            _clients[process.pid] = self.books
            cluster.processes[worker_name(engine, rank)] = process
            self._processes.append(process)

        kernel, name = cluster.world.kernel, worker_name(engine, rank)
        return _WorkerProcess(kernel, name, lambda: self.judged(make()), is_started)

    def judged(self, worker: Worker) -> Worker:
        """Return a worker whose calls are judged."""
        load = worker.connector.start_load_kv

        def load_poisoned(*args: Any) -> None:
            self._poison(worker)
            load(*args)

        worker.connector.start_load_kv = load_poisoned
        self._time_calls(worker.connector)
        return worker

    def _time_calls(self, connector: Any) -> None:
        for name in CALLS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _poison(self, worker: Worker) -> None:
        """Overwrite what the loads of a step must replace, and check that the store keeps it."""
        faults, size = self._simulated.faults, self._simulated.shape.block_size
        groups = () if self.books.named_by is None else self.books.named_by[0]
        for load in worker.connector._get_connector_metadata().loads:
            for run in load.runs:
                hashes = [run.hashes[i : i + 32].hex() for i in range(0, len(run.hashes), 32)]
                name = groups[run.group].name + TAIL * run.is_tail
                if not self.books.keeps(load.request_id, name, hashes):
                    faults.append(f"error: {load.request_id} loads what may be gone")
                for i, block in enumerate(run.block_ids):
                    if run.first * CHUNK_SIZE + i * size >= load.begin:
                        for tensor in worker.memory.by_name.values():
                            tensor[block] = POISON

    @property
    def _paused_s(self) -> float:
        """Return how long its processes have been paused."""
        return sum(process.paused_s for process in self._processes)

    def _prompt(self) -> list[int]:
        dice = self._dice
        if self._last_prompt and dice.random() < REPEAT_CHANCE:
            return self._last_prompt
        self._num_tails += 1
        family = min(int(dice.expovariate(0.25)), NUM_FAMILIES - 1)
        tail = self._seed * 1_000_000 + self._num_tails
        num_tail_tokens = dice.randint(1, MAX_TAIL_CHUNKS * CHUNK_SIZE)
        prompt = prompt_of(family, dice.randrange(NUM_BRANCHES), tail, num_tail_tokens)
        self._last_prompt = prompt.tolist()
        return self._last_prompt

    def _serve(
        self,
        requests: Sequence[Request],
        aborted: Sequence[Request] = (),
        num_steps: int = 0,
        is_reset: bool = False,
    ) -> None:
        """Run until all have ended.

        Args:
            requests: Requests that were added.
            aborted: Requests whose clients disconnect.
            num_steps: Steps after which they disconnect.
            is_reset: Whether vLLM's own cache is then reset, also for requests that run.
        """

        def run() -> None:
            for _ in range(num_steps if aborted or is_reset else 0):
                self._engine.step()
            for request in aborted:
                self._engine.abort(request)
            if is_reset:
                self._engine.scheduler.preempt_all()
            began_s, paused_s = time.monotonic(), self._paused_s
            while self._engine.scheduler.has_requests:
                if not self._engine.step():
                    time.sleep(STEP_S)
                lasted_s = time.monotonic() - began_s - (self._paused_s - paused_s)
                if lasted_s > END_S:
                    raise AssertionError(
                        f"{len(requests)} requests have not ended in {END_S:g} s:"
                        f" {self._engine.described()}"
                    )

        if not self._checked("request", run):
            self._engine.close()
            self._engine = self._open()

    def _forget(self, requests: Sequence[Request], whole: bool) -> None:
        """Forget requests that have ended, and with `whole` also the content of vLLM's own
        blocks.
        """
        for request in requests:
            self._engine.model.forget(request)
            self._engine.scheduler.tallies.pop(request.request_id, None)
        if whole:
            self._checked("forget", self._engine.forget)

    def _checked(self, what: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as exc:
            self._simulated.faults.append(f"error: {what} raised {type(exc).__name__}: {exc}")
            return False
        return True

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if name in ASKING:
                self._simulated.on_call(name)
            process = self._simulated.cluster.world.kernel.process
            assert process is not None
            began_s, paused_s = time.monotonic(), process.paused_s
            try:
                result = call(*args, **options)
                if name == "get_num_new_matched_tokens" and result[0] is not None:
                    self._answered_s = time.monotonic()
                return result
            finally:
                lasted_s = time.monotonic() - began_s
                self._simulated.totals["calls"] += 1
                if lasted_s > BOUND_S and process.paused_s == paused_s:
                    self._simulated.faults.append(
                        f"late: {name} lasted {lasted_s:.2f} s, the bound is {BOUND_S} s"
                    )

        return timed
