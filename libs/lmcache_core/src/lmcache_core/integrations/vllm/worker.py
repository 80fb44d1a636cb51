"""A worker's side: moves KV between vLLM's blocks and the chunk store. Imports nothing of vLLM."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmcache_core.concurrency import Workers
from lmcache_core.engine import ChunkStore
from lmcache_core.engine.guard import CallGuard
from lmcache_core.engine.transfer import BegunLoad, BegunStore, KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import PagedGPUConnector, run_canary
from lmcache_core.gpu_connectors.staging import Staging
from lmcache_core.gpu_connectors.streams import (
    ThreadStreams,
    has_streams,
    record_event,
    use_device,
    wait_on_device,
)
from lmcache_core.integrations.vllm.groups import NULL_BLOCK, CacheGroup, fails_by_block
from lmcache_core.integrations.vllm.identity import FMT, KVIdentity
from lmcache_core.integrations.vllm.memory import GroupMemory, memory_of
from lmcache_core.integrations.vllm.options import ConnectorOptions
from lmcache_core.integrations.vllm.plan import ChunkRun, Load, StepPlan, WorkerReport, this_host
from lmcache_core.integrations.vllm.store_threads import PendingStore, StoreThreads
from lmcache_core.keys import Lane
from lmcache_core.record import MissReason
from lmcache_core.serde.device import DeviceDecoder, decodes_rightly, device_encodings
from lmcache_core.serde.quantised_blob import can_be_quantised
from lmcache_core.telemetry import (
    LOAD_BYTES,
    LOAD_SECONDS,
    MISSED_CHUNKS_TOTAL,
    STORE_BYTES,
    STORE_SECONDS,
    UNSTORED_CHUNKS_TOTAL,
    Counters,
)

logger = logging.getLogger(__name__)

MAX_REST_S = 0.005
"""A step that computes nothing waits this long for loads, because consecutive empty steps would
contend with them for the interpreter's lock. A request that arrives during the wait is delayed by
no more than that.
"""
STORE_QUESTIONS = 2
"""How often a store waits for the sidecar: for memory, and until the chunks are visible."""
STORE_PATIENCE = 50
"""Nothing waits for a store but its threads: it may take this many times as long as a wait in a
step, which is all of the time that it can save.
"""
STEP_SHARE = 8
"""A step waits for the launch of copies of blocks that it overwrites for one part in this many of a
tier's deadline.
"""
MAX_LOADS = 4096
"""Loads that are underway; further ones are refused."""
MAX_BEGUN_LOADS = 2
"""The chunks of one load are asked for while those of another are copied; a third one waits, and
holds nothing of the store.
"""
JOIN_S = 10.0


@dataclass(frozen=True)
class LoadResult:
    """The outcome of a load.

    Attributes:
        bad_blocks: vLLM's blocks without the expected content.
        first_bad: The first token that was not loaded; None if all were.
    """

    request_id: str
    bad_blocks: frozenset[int]
    first_bad: int | None = None


@dataclass(frozen=True)
class _BegunRun:
    """A run of a load whose chunks are held.

    Attributes:
        wanted: The first of its slots to be written, and one past the last.
    """

    run: ChunkRun
    wanted: tuple[int, int]
    begun: BegunLoad


@dataclass(frozen=True)
class _GroupTransfer:
    """The path of one cache group between vLLM and the store.

    Attributes:
        decoder: Decodes its chunks; None: nothing does.
        lane: The common part of the keys of its chunks on this worker.
    """

    group: CacheGroup
    memory: GroupMemory
    connector: PagedGPUConnector
    transfer: KVTransfer
    decoder: DeviceDecoder | None
    lane: Lane

    def has_staging(self) -> bool:
        """Return whether there is memory on the device for copies, of which some is allocated if it
        is missing.
        """
        device = self.memory.kvcaches[0].device
        return self.connector.take_staging(device, self.decoder is not None)

    def named(self, run: ChunkRun) -> list[NamedChunk]:
        """Return the chunks of a run; their positions count from its first slot."""
        units = self.units_of(run)
        lane = self.lane.tail if run.is_tail else self.lane
        return [(i * units, (i + 1) * units, k) for i, k in enumerate(lane.keys(run.hashes))]

    def units_of(self, run: ChunkRun) -> int:
        """Return the slots in each chunk of a run."""
        return run.chunk_blocks * self.group.block_size // self.memory.unit_tokens

    def arguments(
        self, run: ChunkRun, begin: int, end: int, after: torch.cuda.Event | None
    ) -> dict[str, Any]:
        """Return the GPU connector's arguments for slots `[begin, end)` of a run, checked once for
        all of its chunks, whose copies start behind `after`.
        """
        slots = torch.tensor(run.block_ids, dtype=torch.int64)
        size = self.group.block_size
        if self.memory.unit_tokens == 1:
            slots = (slots[:, None] * size + torch.arange(size)).reshape(-1)
        addresses = self.connector.addresses_of(self.memory.kvcaches, slots, begin, end)
        return {"addresses": addresses, "after": after}


class RefusingWorker:
    """A worker's side that cannot use vLLM's memory (yet): every load fails immediately, nothing is
    stored, and reports say that this worker does not take part.

    Args:
        reports_blocks: Report to vLLM which blocks of loads failed; otherwise which requests.
    """

    def __init__(self, reports_blocks: bool) -> None:
        self.reports_blocks = reports_blocks
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._held: set[str] = set()
        self._report = WorkerReport(is_out=True)

    def before_overwriting(self, plan: StepPlan) -> None:
        """Do nothing: no blocks are copied."""

    def begin_step(self, plan: StepPlan) -> None:
        """Do nothing: no load has to wait."""

    def begin_loads(self, plan: StepPlan) -> None:
        """Fail all loads of a step."""
        self._held.update(plan.held)
        for load in plan.loads:
            self._report.failed[load.request_id] = load.begin
            self._received.add(load.request_id)
            if self.reports_blocks:
                self._bad_blocks.update(*(run.block_ids for run in load.runs))
        self._bad_blocks.discard(NULL_BLOCK)

    def store(self, plan: StepPlan) -> None:
        """Store nothing."""

    def take_received(self) -> tuple[set[str], set[str]]:
        """Return as `WorkerSide.take_received` does; all loads failed."""
        received, self._received = self._received, set()
        return received, set(received)

    def take_sent(self) -> set[str]:
        """Return as `WorkerSide.take_sent` does: immediately."""
        sent, self._held = self._held, set()
        return sent

    def take_bad_blocks(self) -> set[int]:
        """Return as `WorkerSide.take_bad_blocks` does."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport:
        """Return the report of a step."""
        report, self._report = self._report, WorkerReport(is_out=True)
        return report


class WorkerSide:
    """Loads and stores for one worker. Called by one thread; stores run in two others, and loads in
    two more.

    Args:
        rank: This worker's rank among all workers of the engine.
        store: The chunk store; opened and closed by its owner.
        guard: Catches every exception that must not reach vLLM.
        is_told_late: vLLM writes to the blocks of a step before it calls `before_overwriting`.
        has_neighbours: Whether vLLM has other connectors, too. Their loads may write to blocks
            without waiting for its compute stream.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        groups: Sequence[CacheGroup],
        identity: KVIdentity,
        rank: int,
        store: ChunkStore,
        counters: Counters,
        guard: CallGuard,
        *,
        is_told_late: bool = False,
        has_neighbours: Callable[[], bool] = lambda: False,
    ) -> None:
        self.reports_blocks = fails_by_block(groups)
        """Whether failed loads are reported by block; otherwise by request."""
        self._chunk_size = options.engine.chunk_size
        self._layout = options.layout
        self._groups = tuple(groups)
        self._metadata = replace(identity.metadata, worker_id=identity.rank_of(rank))
        self._num_ranks = identity.num_ranks
        self._stores = identity.stores(rank)
        self._is_told_late = is_told_late
        self._has_neighbours = has_neighbours
        self._store = store
        self._counters = counters
        self._guard = guard
        self._workers = Workers("lmcache-digest")
        self._transfers: list[_GroupTransfer] = []
        self._loads = LoadThreads(self._begin_load, lambda load: self._result(load, load.begin))
        self._store_threads = StoreThreads(
            self._begin_store, options.engine.tier_timeout_s / STEP_SHARE
        )
        self._streams = ThreadStreams()
        self._staging = Staging()
        self._begun: torch.cuda.Event | None = None
        self._held: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport(hosts={this_host()})

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        backends_of: Callable[[Sequence[str]], str] = lambda layers: "",
    ) -> None:
        """Register vLLM's KV tensors, and check with a pattern that they are read and written as
        vLLM does it. Nothing can be loaded or stored before.

        Args:
            kv_caches: The tensor of each layer, by name; not in use yet.

        Raises:
            LayoutError: They do not match vLLM's description, or the pattern came back changed.
        """
        self._workers.open()
        transfers = []
        for group in self._groups:
            backends = backends_of(group.layers)
            memory = memory_of(group, kv_caches, num_blocks, self._layout, backends)
            tried = self._transfer_of(group, memory, keeps_staging=False)
            through_store = tried.transfer.through_store
            run_canary(tried.connector, memory.kvcaches, memory.engine, through_store)
            # vLLM may call this inside a memory pool that sleep mode empties: what the canary
            # created on the device (addresses) is dropped, and created again outside of the pool
            # when first needed.
            transfers.append(self._transfer_of(group, memory, self._decoder_of(memory)))
        self._transfers = transfers
        if transfers and has_streams(self._device):
            # Before the engine serves: its calls of CUDA would wait for this.
            self._store.pin_memory(self._device)
            # A memory pool that this thread is in does not hold what another thread takes.
            with ThreadPoolExecutor(1, initializer=use_device, initargs=(self._device,)) as outside:
                outside.submit(self._take_memory).result()
        self._loads.open()
        self._store_threads.open()

    def close(self) -> None:
        """Stop running work. Idempotent."""
        self._store_threads.close()
        self._loads.close()
        self._workers.close()

    def wait_for_copies(self) -> None:
        """Wait until nothing reads or writes vLLM's memory, at most `JOIN_S` for stores and for
        loads.
        """
        if not (self._store_threads.wait(JOIN_S) and self._loads.wait_for_all(JOIN_S)):
            logger.error("copies did not end: waited_s=%g", JOIN_S)

    def before_overwriting(self, plan: StepPlan) -> None:
        """Let the device write nothing of a step before copies of blocks that it overwrites."""
        self._write_behind_copies(plan.overwritten)

    def begin_step(self, plan: StepPlan) -> None:
        """Note where a step begins, before its forward pass is launched. Its loads wait for
        everything before, which may still use their blocks, and not for the step.
        """
        if plan.loads:
            self._begun = record_event(self._device)

    def begin_loads(self, plan: StepPlan) -> None:
        """Start the loads of this step."""
        self._held.update(plan.held)
        self._report.step = plan.step
        for load in plan.loads:
            self._loads.submit(load, self._begun)
        if plan.waits_for_loads:
            self._loads.wait(MAX_REST_S)

    def store(self, plan: StepPlan) -> None:
        """Let the store threads copy out the chunks that the step has completed. Until then vLLM
        keeps their blocks (`take_sent`), or writes behind the copies (`before_overwriting`). Where
        that would be too late, this orders them.
        """
        if not (self._stores and plan.stores and self._transfers):
            return
        with self._guard("store"):
            computed = record_event(self._device)
            for store in plan.stores:
                num_bytes = self._num_bytes(store.runs)
                pending = PendingStore(store, num_bytes, plan.recompute_s or 0.0, computed)
                if not self._store_threads.submit(pending):
                    self._dropped(store.runs)
            if self._is_told_late:
                self._write_behind_copies(None)

    def take_sent(self) -> set[str]:
        """Return the finished requests whose blocks vLLM no longer needs to keep."""
        sent = {name for name in self._held if not self._store_threads.reads(name)}
        self._held -= sent
        return sent

    def take_received(self) -> tuple[set[str], set[str]]:
        """Return the requests whose load has ended, and those of them whose load failed."""
        results = self._loads.take_results()
        for result in results:
            self._bad_blocks |= result.bad_blocks
            if result.first_bad is not None:
                self._report.failed[result.request_id] = result.first_bad
        failed = {result.request_id for result in results if result.first_bad is not None}
        return {result.request_id for result in results}, failed

    def take_bad_blocks(self) -> set[int]:
        """Return vLLM's blocks without the KV that was to be loaded."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """Return the report of this step for the scheduler's side; None if there is nothing to
        report.
        """
        report, self._report = self._report, WorkerReport()
        return report if report != WorkerReport() else None

    def _decoder_of(self, memory: GroupMemory) -> DeviceDecoder | None:
        """Return what decodes chunks of a group on the GPU; None without a GPU, or with one whose
        kernels decode a known tensor wrongly.
        """
        device = memory.kvcaches[0].device
        specs = memory.layout.tensor_specs(self._chunk_size // memory.unit_tokens)
        can_be_encoded = all(can_be_quantised(spec.dtype, spec.shape) for spec in specs)
        if not (device_encodings(device.type) and can_be_encoded):
            return None
        kinds = {(getattr(torch, spec.dtype), *spec.shape[2:]) for spec in specs}
        if all(decodes_rightly(device, *kind) for kind in kinds):
            return DeviceDecoder(device)
        logger.error("kernels decode wrongly, encoded chunks count as misses: device=%s", device)
        return None

    def _take_memory(self) -> None:
        """Take what copies need of the device before vLLM serves."""
        with self._guard("retrieve"):
            # The buffers have the size of the largest chunks.
            for lane in sorted(self._transfers, key=self._chunk_bytes, reverse=True):
                if lane.has_staging() and lane.decoder is not None:
                    lane.decoder.take_tables()

    def _chunk_bytes(self, lane: _GroupTransfer) -> int:
        return lane.memory.layout.num_bytes(self._chunk_size // lane.memory.unit_tokens)

    def _transfer_of(
        self,
        group: CacheGroup,
        memory: GroupMemory,
        decoder: DeviceDecoder | None = None,
        keeps_staging: bool = True,
    ) -> _GroupTransfer:
        keeps_staging = keeps_staging and has_streams(memory.kvcaches[0].device)
        units = self._chunk_size // memory.unit_tokens if keeps_staging else 0
        connector = PagedGPUConnector(memory.layout, units, self._staging)
        metadata = replace(self._metadata, kv_dtype=memory.layout.kv_dtype)
        transfer = KVTransfer(
            self._store,
            connector,
            metadata,
            self._counters,
            self._workers,
            memory.unit_tokens,
            decoder,
        )
        lane = Lane(FMT, metadata.model_name, self._num_ranks, metadata.worker_id, group.name)
        return _GroupTransfer(group, memory, connector, transfer, decoder, lane)

    @property
    def _device(self) -> torch.device:
        return self._transfers[0].memory.kvcaches[0].device

    def _begin_load(
        self, load: Load, after: torch.cuda.Event | None
    ) -> Callable[[bool], LoadResult]:
        """Ask the store for the chunks of a load, and return what ends it: copies them into vLLM's
        blocks, behind `after`, if it is called with True, and gives them back in any case.
        """
        began = time.monotonic()
        begun: deque[_BegunRun] = deque()
        missing: list[int] = []
        is_begun = False
        with self._guard("retrieve"):
            ends = {run.group: self._end_of(run) for run in load.runs}  # a tail is the last one
            for run in load.runs:
                wanted = self._wanted(run, load, ends[run.group])
                if wanted is None:
                    missing.append(self._first_missing(run, load, 0))
                    continue
                lane = self._transfers[run.group]
                chunks = lane.transfer.begin_load(lane.named(run), load.recompute_s)
                begun.append(_BegunRun(run, wanted, chunks))
            is_begun = True
        asked_s = time.monotonic() - began

        def end(is_copied: bool) -> LoadResult:
            first_bad: int | None = load.begin
            began = time.monotonic() - asked_s
            if is_begun and is_copied:
                with (
                    self._guard("retrieve"),
                    torch.inference_mode(),
                    self._streams.own(self._device),
                ):
                    while begun:
                        one = begun[0]
                        lane = self._transfers[one.run.group]
                        has_staging = lane.has_staging()
                        arguments = lane.arguments(one.run, *one.wanted, after)
                        begun.popleft()  # both give its chunks back
                        if has_staging:
                            num_loaded = lane.transfer.finish_load(one.begun, arguments, one.wanted)
                        else:
                            num_loaded = 0
                            lane.transfer.abandon_load(one.begun)
                            self._counters.add(
                                MISSED_CHUNKS_TOTAL, one.run.num_chunks, MissReason.UNAVAILABLE
                            )
                        if num_loaded < one.run.num_chunks:
                            missing.append(self._first_missing(one.run, load, num_loaded))
                    first_bad = min(missing, default=None)
            for one in begun:
                with self._guard("retrieve"):
                    self._transfers[one.run.group].transfer.abandon_load(one.begun)
            if first_bad is None:
                self._observe(LOAD_SECONDS, LOAD_BYTES, began, self._num_bytes(load.runs))
            return self._result(load, first_bad)

        return end

    def _result(self, load: Load, first_bad: int | None) -> LoadResult:
        """Return a load's result; without blocks if vLLM treats the whole request as failed."""
        if first_bad is None:
            return LoadResult(load.request_id, frozenset())
        bad: set[int] = set()
        for run in load.runs if self.reports_blocks else ():
            size = self._groups[run.group].block_size
            start = run.first * self._chunk_size
            first = max(0, first_bad - start) // size
            bad.update(run.block_ids[first : -(-(load.end - start) // size)])
        return LoadResult(load.request_id, frozenset(bad - {NULL_BLOCK}), first_bad)

    def _end_of(self, run: ChunkRun) -> int:
        size = self._groups[run.group].block_size
        return run.first * self._chunk_size + len(run.block_ids) * size

    def _wanted(self, run: ChunkRun, load: Load, end_of_group: int) -> tuple[int, int] | None:
        """Return the slots of a run to be written, from the first to one past the last; None if a
        block or chunk of them is missing.

        Args:
            end_of_group: Where the last run of the group ends.
        """
        lane = self._transfers[run.group]
        size, unit = lane.group.block_size, lane.memory.unit_tokens
        start = run.first * self._chunk_size
        end = min(load.end, self._end_of(run))
        present = (i for i, block in enumerate(run.block_ids) if block != NULL_BLOCK)
        num_absent = next(present, len(run.block_ids))
        begin = max(load.begin, start)
        needed = max(begin, lane.group.first_needed_token(load.end))
        first = max(begin, start + num_absent * size)
        blocks = run.block_ids[(first - start) // size : -(-(end - start) // size)]
        if first > needed or end_of_group < load.end or NULL_BLOCK in blocks:
            logger.error("block or chunk missing, not loading: request=%s", load.request_id)
            return None
        return (first - start) // unit, (end - start) // unit

    def _first_missing(self, run: ChunkRun, load: Load, num_loaded: int) -> int:
        """Return the first token whose KV is missing if so many chunks of a run are loaded."""
        return max((run.first + num_loaded) * self._chunk_size, load.begin)

    def _write_behind_copies(self, request_ids: Collection[str] | None) -> None:
        """Let what vLLM's stream is given from now on start behind copies of these requests' blocks
        (None: of all). The host waits for their launch only; for their end if others write, too.
        """
        for event in self._store_threads.before_overwriting(request_ids):
            if self._has_neighbours():
                event.synchronize()
            else:
                wait_on_device(event)

    def _begin_store(self, pending: PendingStore) -> Callable[[], None]:
        """Launch the copies of a store, and return what ends it."""
        begun: list[tuple[KVTransfer, BegunStore]] = []
        began = time.monotonic()
        with self._guard("store"), torch.inference_mode(), self._streams.own(self._device):
            for run in pending.store.runs:
                if self._is_wanted(run, pending):
                    begun.append(self._begin_run(run, pending.computed))
                else:
                    self._dropped([run])
        read = [event for _, store in begun for event in store.launched.read]
        self._store_threads.launched(pending, read)

        def end() -> None:
            for transfer, store in begun:
                with self._guard("store"):
                    use_device(self._device)
                    transfer.finish_store(store, is_intact=not pending.is_given_up)
            if begun and not pending.is_given_up:
                self._observe(STORE_SECONDS, STORE_BYTES, began, pending.num_bytes)

        return end

    def _is_wanted(self, run: ChunkRun, pending: PendingStore) -> bool:
        patience = STORE_PATIENCE / STORE_QUESTIONS
        saving_s = pending.recompute_s * run.num_chunks * patience
        return (
            not pending.is_given_up
            and self._store.is_worth(saving_s)
            and self._transfers[run.group].has_staging()
        )

    def _begin_run(
        self, run: ChunkRun, computed: torch.cuda.Event | None
    ) -> tuple[KVTransfer, BegunStore]:
        lane = self._transfers[run.group]
        named = lane.named(run)
        arguments = lane.arguments(run, named[0][0], named[-1][1], computed)
        return lane.transfer, lane.transfer.begin_store(named, arguments)

    def _num_bytes(self, runs: Iterable[ChunkRun]) -> int:
        lanes = ((run, self._transfers[run.group]) for run in runs)
        return sum(
            run.num_chunks * lane.memory.layout.num_bytes(lane.units_of(run)) for run, lane in lanes
        )

    def _observe(self, seconds: str, num_bytes: str, began: float, size: int) -> None:
        self._counters.observe(seconds, time.monotonic() - began)
        self._counters.observe(num_bytes, size)

    def _dropped(self, runs: Iterable[ChunkRun]) -> None:
        self._counters.add(UNSTORED_CHUNKS_TOTAL, sum(run.num_chunks for run in runs))


class LoadThreads:
    """Runs loads in two threads that end with the process: one asks for the chunks of the next load
    while the other one copies those of the last.

    Args:
        begin: Asks for the chunks of a load, whose copies start behind an event, and returns what
            ends it: if called with False, without a copy. Neither may raise.
        refuse: Returns the result of a load that is not attempted.
    """

    def __init__(
        self,
        begin: Callable[[Load, torch.cuda.Event | None], Callable[[bool], LoadResult]],
        refuse: Callable[[Load], LoadResult],
    ) -> None:
        self._begin = begin
        self._refuse = refuse
        self._waiting: queue.SimpleQueue[tuple[Load, torch.cuda.Event | None] | None] = (
            queue.SimpleQueue()
        )
        self._begun: queue.SimpleQueue[Callable[[bool], LoadResult] | None] = queue.SimpleQueue()
        self._has_changed = threading.Condition()
        self._num_underway = self._num_begun = 0
        self._results: list[LoadResult] = []
        self._is_closing = False
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("lmcache-gets", self._ask), ("lmcache-loads", self._copy))
        ]

    def open(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop after the load that is being copied; the others are refused. Idempotent.

        A load that does not end within `JOIN_S` is left to its thread.
        """
        if not self._threads[1].is_alive() or self._is_closing:
            return
        with self._has_changed:
            self._is_closing = True
            self._has_changed.notify_all()
        self._waiting.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                logger.error(
                    "load did not end, leaving it: thread=%s waited_s=%g", thread.name, JOIN_S
                )
        self._begun.put(None)
        self._copy()  # gives back what that thread has not come to

    def submit(self, load: Load, after: torch.cuda.Event | None = None) -> None:
        """Queue a load; beyond `MAX_LOADS` it is refused."""
        with self._has_changed:
            self._num_underway += 1
            is_refused = self._num_underway > MAX_LOADS
        if is_refused:
            logger.warning(
                "too many loads wait, recomputing: request=%s limit=%d", load.request_id, MAX_LOADS
            )
            self._done(self._refuse(load))
        else:
            self._waiting.put((load, after))

    def wait(self, limit_s: float) -> None:
        """Wait until there is a result to take or no load is underway, at most `limit_s`."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._results or not self._num_underway, limit_s)

    def wait_for_all(self, limit_s: float) -> bool:
        """Wait until no load is underway, at most `limit_s`; return whether that is so."""
        with self._has_changed:
            return self._has_changed.wait_for(lambda: not self._num_underway, limit_s)

    def take_results(self) -> list[LoadResult]:
        """Return the loads that have ended since the last call."""
        with self._has_changed:
            results, self._results = self._results, []
        return results

    def _ask(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            with self._has_changed:
                self._has_changed.wait_for(
                    lambda: self._num_begun < MAX_BEGUN_LOADS or self._is_closing
                )
                is_begun = not self._is_closing
                self._num_begun += is_begun
            if is_begun:
                self._begun.put(self._begin(*waiting))
            else:
                self._done(self._refuse(waiting[0]))
        self._begun.put(None)

    def _copy(self) -> None:
        while (end := self._begun.get()) is not None:
            result = end(not self._is_closing)
            del end  # else an arena that is gone would stay mapped until the next load
            with self._has_changed:
                self._num_begun -= 1
            self._done(result)

    def _done(self, result: LoadResult) -> None:
        with self._has_changed:
            self._results.append(result)
            self._num_underway -= 1
            self._has_changed.notify_all()
