"""A worker's side: chunks between vLLM's blocks and the chunk store. Imports nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmcache_core.concurrency import Workers
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import ChunkStore
from lmcache_core.engine.guard import CallGuard
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import PagedGPUConnector, run_canary
from lmcache_core.integrations.vllm.groups import NULL_BLOCK, CacheGroup, fails_by_block
from lmcache_core.integrations.vllm.identity import FMT, KVIdentity
from lmcache_core.integrations.vllm.loads import LoadResult, LoadThread
from lmcache_core.integrations.vllm.memory import GroupMemory, memory_of
from lmcache_core.integrations.vllm.options import ConnectorOptions
from lmcache_core.integrations.vllm.plan import ChunkRun, Load, StepPlan, WorkerReport, this_host
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import HOT_TIER
from lmcache_core.telemetry import UNSTORED_CHUNKS_TOTAL, Counters

logger = logging.getLogger(__name__)

MAX_REST_S = 0.005
"""A step that computes nothing waits this long for loads: empty steps in a row would take the
interpreter's lock from them. A request that arrives meanwhile waits no longer than that.
"""

STORE_QUESTIONS = 2
"""How often a step waits for the sidecar when it stores: for memory, and until it is visible."""


@dataclass(frozen=True)
class _GroupTransfer:
    """One group's way between vLLM and the store."""

    group: CacheGroup
    memory: GroupMemory
    connector: PagedGPUConnector
    transfer: KVTransfer


class RefusingWorker:
    """A worker's side where there can be none: every load fails at once, and the scheduler's side
    hears that this worker is out.

    Args:
        reports_blocks: Whether asynchronous loads that fail are told by block; otherwise vLLM hears
            of requests.
    """

    def __init__(self, reports_blocks: bool) -> None:
        self.reports_blocks = reports_blocks
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport(is_out=True)

    def register(self, *_: Any) -> None:
        """Take nothing of vLLM's tensors."""

    def close(self) -> None:
        """Nothing runs."""

    def begin_loads(self, plan: StepPlan) -> None:
        """Fail all of them."""
        for load in plan.loads:
            self._report.failed.add(load.request_id)
            (self._received if load.is_async else self._report.loaded).add(load.request_id)
            if self.reports_blocks or not load.is_async:
                self._bad_blocks.update(
                    block for run in load.runs for block in run.block_ids if block != NULL_BLOCK
                )

    def store(self, plan: StepPlan) -> None:
        """Store nothing."""

    def take_received(self) -> tuple[set[str], set[str]]:
        """See `WorkerSide.take_received`."""
        received, self._received = self._received, set()
        return received, set(received)

    def take_bad_blocks(self) -> set[int]:
        """See `WorkerSide.take_bad_blocks`."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport:
        """See `WorkerSide.take_report`."""
        report, self._report = self._report, WorkerReport(is_out=True)
        return report


class WorkerSide:
    """Loads and stores for one worker. Called by one thread; asynchronous loads run in another.

    Args:
        options: Options.
        groups: The cache groups.
        identity: What the KV is.
        rank: This worker's number among all of the engine.
        store: The chunk store; opened and closed by its owner.
        counters: What is counted.
        guard: Stands around everything that vLLM must not feel.
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
    ) -> None:
        self._options = options
        self._groups = tuple(groups)
        self._identity = identity
        self._kv_rank = identity.rank_of(rank)
        self._stores = identity.stores(rank)
        self._store = store
        self._counters = counters
        self._guard = guard
        self._workers = Workers("lmcache-digest")
        self._lanes: list[_GroupTransfer] = []
        self._loads = LoadThread(self._load, self._refused)
        self._sync_results: list[LoadResult] = []
        self._bad_blocks: set[int] = set()
        self._failed_in_step: set[str] = set()
        self._report = WorkerReport(hosts={this_host()})

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        backends_of: Callable[[Sequence[str]], str] = lambda layers: "",
    ) -> None:
        """Take vLLM's KV tensors, and check with a pattern that they are read and written as vLLM
        does it.

        Args:
            kv_caches: The tensor of each layer, by name; nobody uses them yet.
            num_blocks: Blocks in each.
            backends_of: Names the attention backends of layers.

        Raises:
            LayoutError: They are not what vLLM says that they are, or the pattern did not come
                back.
        """
        metadata = replace(self._identity.metadata, worker_id=self._kv_rank)
        self._workers.open()
        lanes = []
        for group in self._groups:
            memory = memory_of(
                group, kv_caches, num_blocks, self._options.layout, backends_of(group.layers)
            )
            described = replace(metadata, kv_dtype=memory.layout.kv_dtype)
            tried = self._lane(group, memory, described)
            run_canary(
                tried.connector, memory.kvcaches, memory.engine, tried.transfer.through_store
            )
            # vLLM may call this inside a memory pool that sleep mode empties: what the canary has
            # made on the device (addresses, staging) is dropped, and made again outside of it when
            # it is first needed.
            lanes.append(self._lane(group, memory, described))
        self._lanes = lanes
        self._loads.open()

    def close(self) -> None:
        """End what runs. Idempotent."""
        self._loads.close()
        self._workers.close()

    @property
    def reports_blocks(self) -> bool:
        """Whether failed loads are told by block; otherwise vLLM hears of requests."""
        return fails_by_block(self._groups)

    def begin_loads(self, plan: StepPlan) -> None:
        """Do the loads that this step waits for, begin the others."""
        self._failed_in_step = set()
        self._report.step = plan.step
        for load in plan.loads:
            if load.is_async and self._lanes:
                self._loads.submit(load)
            elif load.is_async:
                self._loads.refuse(load)
            else:
                result = self._load(load)
                self._sync_results.append(result)
                if not result.is_good:
                    self._failed_in_step.add(load.request_id)
        if plan.waits_for_loads:
            self._loads.wait(MAX_REST_S)

    def store(self, plan: StepPlan) -> None:
        """Copy out what the step has completed; vLLM may use its blocks for something else when
        this returns.

        With speculative decoding this is called behind `take_bad_blocks`: the draft model writes KV
        as well.
        """
        if not self._stores or not self._lanes:
            return
        # What was computed behind KV that is not there is nobody's KV.
        stores = [store for store in plan.stores if store.request_id not in self._failed_in_step]
        with self._guard("store"), torch.inference_mode():
            for store in stores:
                for run in store.runs:
                    self._store_run(run, store.num_unsure, plan.recompute_s or 0.0)

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose asynchronous load is over, and those of them of which it failed."""
        results = self._loads.take_results()
        for result in results:
            self._note(result)
        return {result.request_id for result in results}, {
            result.request_id for result in results if not result.is_good
        }

    def take_bad_blocks(self) -> set[int]:
        """vLLM's blocks that do not hold what they were to be loaded with; ends the step's
        synchronous loads.
        """
        for result in self._sync_results:
            self._note(result)
            self._report.loaded.add(result.request_id)
        self._sync_results.clear()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """What the scheduler's side is to hear of this step; None when that is nothing."""
        report, self._report = self._report, WorkerReport()
        report.is_out = not self._lanes
        return report if report != WorkerReport() else None

    def _lane(
        self, group: CacheGroup, memory: GroupMemory, metadata: LMCacheEngineMetadata
    ) -> _GroupTransfer:
        is_on_device = memory.kvcaches[0].device.type != "cpu"
        connector = PagedGPUConnector(memory.layout, self._units(memory) if is_on_device else 0)
        transfer = KVTransfer(
            self._store, connector, metadata, self._counters, self._workers, memory.unit_tokens
        )
        return _GroupTransfer(group, memory, connector, transfer)

    def _note(self, result: LoadResult) -> None:
        self._bad_blocks |= result.bad_blocks
        if not result.is_good:
            self._report.failed.add(result.request_id)

    def _load(self, load: Load) -> LoadResult:
        first_bad: int | None = load.begin
        with self._guard("retrieve"), torch.inference_mode():
            if not self._lanes:
                return self._refused(load)
            bad = [token for run in load.runs if (token := self._load_run(run, load)) is not None]
            first_bad = min(bad, default=None)
        return self._result(load, first_bad)

    def _refused(self, load: Load) -> LoadResult:
        return self._result(load, load.begin)

    def _result(self, load: Load, first_bad: int | None) -> LoadResult:
        """A load's result; without blocks where vLLM is to take the whole request for failed."""
        if first_bad is None:
            return LoadResult(load.request_id, frozenset(), is_good=True)
        bad: set[int] = set()
        for run in load.runs if self.reports_blocks else ():
            group = self._groups[run.group]
            start = run.first * self._options.engine.chunk_size
            bad |= set(
                run.block_ids[
                    (first_bad - start) // group.block_size : -(
                        -(load.end - start) // group.block_size
                    )
                ]
            )
        return LoadResult(load.request_id, frozenset(bad - {NULL_BLOCK}), is_good=False)

    def _load_run(self, run: ChunkRun, load: Load) -> int | None:
        """Load one group's chunks; the first token whose KV is not there, None when all is."""
        lane = self._lanes[run.group]
        chunk_size, unit = self._options.engine.chunk_size, lane.memory.unit_tokens
        start = run.first * chunk_size
        end = min(load.end, start + len(run.hashes) * chunk_size)
        num_absent = next(
            (i for i, block in enumerate(run.block_ids) if block != NULL_BLOCK), len(run.block_ids)
        )
        needed = max(load.begin, start, lane.group.first_needed_token(load.end))
        begin = max(load.begin, start, start + num_absent * lane.group.block_size)
        blocks = run.block_ids[
            (begin - start) // lane.group.block_size : -(-(end - start) // lane.group.block_size)
        ]
        if begin > needed or end < load.end or NULL_BLOCK in blocks:
            logger.error("no block or no chunk for KV to load: request=%s", load.request_id)
            return max(start, load.begin)
        wanted = ((begin - start) // unit, (end - start) // unit)
        num_loaded = lane.transfer.load(
            self._named(run, lane), load.recompute_s, self._arguments(run, lane, *wanted), wanted
        )
        return (
            None
            if num_loaded == len(run.hashes)
            else max(start + num_loaded * chunk_size, load.begin)
        )

    def _store_run(self, run: ChunkRun, num_unsure: int, recompute_s: float) -> None:
        """Store one group's chunks, unless the engine's step would wait longer for that than
        they are worth.
        """
        if not self._store.is_worth(recompute_s * len(run.hashes) / STORE_QUESTIONS):
            self._counters.add(UNSTORED_CHUNKS_TOTAL, len(run.hashes))
            return
        lane = self._lanes[run.group]
        named = self._named(run, lane)
        # The scheduler knows of the others that they were not there when the request came.
        num_asked = max(0, num_unsure // self._options.engine.chunk_size - run.first)
        num_known = (
            self._store.lookup([key for _, _, key in named[:num_asked]], [HOT_TIER])
            if num_asked
            else 0
        )
        if num_known < len(named):
            lane.transfer.store(
                named[num_known:], self._arguments(run, lane, named[num_known][0], named[-1][1])
            )

    def _named(self, run: ChunkRun, lane: _GroupTransfer) -> list[NamedChunk]:
        """The chunks of a run; their places count from its first slot."""
        units, metadata = self._units(lane.memory), self._identity.metadata
        keys = (
            CacheEngineKey(
                FMT,
                metadata.model_name,
                self._identity.num_ranks,
                self._kv_rank,
                digest.hex(),
                lane.group.name,
            )
            for digest in run.hashes
        )
        return [(i * units, (i + 1) * units, key) for i, key in enumerate(keys)]

    def _arguments(
        self, run: ChunkRun, lane: _GroupTransfer, begin: int, end: int
    ) -> dict[str, Any]:
        """The GPU connector's arguments for slots `[begin, end)` of a run, checked once for all
        of its chunks.
        """
        slots = torch.tensor(run.block_ids, dtype=torch.int64)
        if lane.memory.unit_tokens == 1:
            slots = (
                slots[:, None] * lane.group.block_size + torch.arange(lane.group.block_size)
            ).reshape(-1)
        return {"addresses": lane.connector.addresses_of(lane.memory.kvcaches, slots, begin, end)}

    def _units(self, memory: GroupMemory) -> int:
        """Slots of a chunk."""
        return self._options.engine.chunk_size // memory.unit_tokens
