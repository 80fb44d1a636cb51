"""vLLM's connector interface: each call goes to the scheduler's or a worker's side.

The cache is never in vLLM's way: what fails inside a call is logged and counted, and the call
answers as if nothing were cached. Only a configuration that cannot work is refused, when the engine
starts.

Source: `vllm/distributed/kv_transfer/kv_connector/v1/base.py` of vLLM 0.24 to 0.32; what differs
    between them is asked for by name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.platforms import current_platform

from lmcache_core._typing import override
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.integrations.vllm.groups import (
    cache_groups,
    check_chunk_size,
    check_packing,
    fails_by_block,
)
from lmcache_core.integrations.vllm.identity import Roots, identity_of
from lmcache_core.integrations.vllm.memory import attention_backends
from lmcache_core.integrations.vllm.options import ASYNC, PREFIX, ConnectorOptions, read_options
from lmcache_core.integrations.vllm.plan import Load, StepPlan, Store, WorkerReport
from lmcache_core.integrations.vllm.scheduler import SchedulerSide
from lmcache_core.integrations.vllm.stats import (
    HIT_SOURCE,
    LMCachePromMetrics,
    LMCacheStats,
    StatsTaker,
    hit_sources,
)
from lmcache_core.integrations.vllm.stores import OpenStore, open_store
from lmcache_core.integrations.vllm.worker import RefusingWorker, WorkerSide
from lmcache_core.telemetry import Counters

logger = logging.getLogger(__name__)

SIDECAR_HINT = f'run a sidecar, and set "{PREFIX}sidecar_socket" to its socket'
HAS_TRANSFER_RESULTS = hasattr(base.KVConnectorBase_V1, "get_transfer_results")
"""Since 0.30 a failed load can be reported by request (`fails_by_block`); before, a model with
several groups has one for us.
"""
BASES = (
    (base.KVConnectorBase_V1, base.SupportsHMA)
    if HAS_TRANSFER_RESULTS
    else (base.KVConnectorBase_V1,)
)


class LMCacheConnector(*BASES):  # type: ignore[misc]
    """See the package's documentation and `docs/vllm.md`.

    Args:
        vllm_config: vLLM's configuration.
        role: Scheduler or worker.
        kv_cache_config: vLLM's cache groups.

    Raises:
        ConfigError: An option is wrong.
        ValueError: A chunk would not be whole blocks.
    """

    _cache_hit_source = HIT_SOURCE

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as(theirs=logging.getLogger("vllm"), ours=logging.getLogger("lmcache_core"))
        self._counters = Counters()
        self._guard = DegradingGuard(self._counters, raised=())
        self._taker = StatsTaker(self._counters)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | RefusingWorker | None = None
        self._open_store: OpenStore | None = None
        options = _options_of(vllm_config)
        try:
            self._open(vllm_config, kv_cache_config, options)
        except LayoutError as exc:
            logger.error("model served without the cache: reason=%s", exc)
            if self.role is base.KVConnectorRole.WORKER:
                # The scheduler's side may know nothing of it, and promise loads that have to be
                # answered.
                self._worker = RefusingWorker(reports_blocks=not HAS_TRANSFER_RESULTS)

    def _open(self, vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> None:
        groups = cache_groups(kv_cache_config)
        check_chunk_size(groups, options.engine.chunk_size)
        check_packing(groups, options.layout)
        if not fails_by_block(groups) and not HAS_TRANSFER_RESULTS:
            raise LayoutError(
                "sliding windows only: vLLM before 0.30 cannot be told that a load of theirs has"
                " failed"
            )
        if not fails_by_block(groups) or _steps_overlap(vllm_config):
            # A synchronous load that fails could not be reported, or only when a step behind it has
            # begun to compute with it.
            options = replace(options, load=ASYNC)
        if options.engine.sidecar_socket is None and vllm_config.parallel_config.world_size > 1:
            raise ConfigError(
                "a cache inside vLLM serves one worker, not"
                f" {vllm_config.parallel_config.world_size}: {SIDECAR_HINT}"
            )
        is_worker = self.role is base.KVConnectorRole.WORKER
        identity = identity_of(
            vllm_config, kv_cache_config, groups, options, _release(), is_worker=is_worker
        )
        roots = Roots(identity)
        rank = vllm_config.parallel_config.rank if is_worker else 0
        engine_id = _engine_id(vllm_config, rank)
        metadata = replace(identity.metadata, worker_id=identity.rank_of(rank))
        names = () if is_worker else tuple(group.name for group in groups)
        loads_beside = is_worker and options.is_async
        self._open_store = open_store(
            engine_id, options.engine, metadata, names, self._counters, roots.use_salt, loads_beside
        )
        store = self._open_store.store
        if is_worker:
            self._worker = WorkerSide(
                options, groups, identity, rank, store, self._counters, self._guard
            )
            return
        _warn_of_policy(vllm_config)
        if self._open_store.is_alone:
            logger.error(
                "the worker runs in another process, which a cache inside vLLM does not reach: %s",
                SIDECAR_HINT,
            )
        self._scheduler = SchedulerSide(options, groups, identity, store, roots)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a miss later, nothing more."""
        return False

    @override
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._open_store is not None:
            self._open_store.close()

    @override
    def get_kv_connector_stats(self) -> LMCacheStats | None:
        return self._taker.take()

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LMCacheStats:
        return LMCacheStats(data=data or {})

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LMCachePromMetrics:
        return LMCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout that `kv_cache_layout` asks for; any will do."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        layout: str | None = extra.get(PREFIX + "kv_cache_layout") or extra.get("kv_cache_layout")
        return layout

    @override
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            with self._guard("new_request"):
                self._scheduler.new_request(request)

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = (0, False)
        if self._scheduler is not None:
            with self._guard("lookup"):
                answer = self._scheduler.num_matched(request, num_computed_tokens)
        return answer

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        # What is to be loaded must be planned, or vLLM takes blocks for loaded that are not: that
        # is not guarded, and asks no store.
        with self._guard("allocated") if num_external_tokens == 0 else nullcontext():
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @override
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        sources: dict[Any, int] = {}
        if self._scheduler is not None:
            with self._guard("sources"):
                sources = hit_sources(self._scheduler.origins_of(request, num_external_tokens))
        return sources

    @override
    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        if self._scheduler is None:
            return StepPlan()
        # Not guarded: what vLLM was promised must be loaded, or be reported as failed.
        loads = self._scheduler.plan_loads()
        stores = self._planned_stores(self._scheduler, scheduler_output, loads)
        if stores is None:
            self._scheduler.stores.lose_track()
        return StepPlan(
            loads,
            stores or (),
            self._scheduler.waits_for_loads(scheduler_output),
            self._scheduler.recompute_s,
            self._scheduler.step,
        )

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        report: WorkerReport | None = connector_output.kv_connector_worker_meta
        if self._scheduler is not None:
            with self._guard("step"):
                self._scheduler.step_done(report, connector_output.finished_recving or ())

    @override
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Blocks may be freed at once: stores have ended when their step has.
        if self._scheduler is not None:
            with self._guard("finish"):
                self._scheduler.finished(request)
        return False, None

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Use nothing that is cached from now on: weights may have been replaced. It stays in the
        store, for others.
        """
        if self._scheduler is not None:
            self._scheduler.begin_epoch()
        return True

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None:
            return
        with self._guard("attach"):
            try:
                backends_of = functools.partial(attention_backends, self._vllm_config)
                self._worker.register(kv_caches, self._kv_cache_config.num_blocks, backends_of)
            except LayoutError as exc:
                logger.error("this worker neither loads nor stores: reason=%s", exc)

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: what a step needs has been loaded before it."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: chunks are copied out once, when the step has ended."""

    @override
    def wait_for_save(self) -> None:
        if self._worker is not None and self.has_connector_metadata():
            self._worker.store(self._plan)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._take_received()[0] or None

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        received, failed = self._take_received()
        told_by_block = self._worker is None or self._worker.reports_blocks
        return base.KVConnectorTransferResults(
            finished_recving=received, failed_recving=set() if told_by_block else failed
        )

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_bad_blocks()

    @override
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return None if self._worker is None else self._worker.take_report()

    def _planned_stores(
        self, scheduler: SchedulerSide, output: Any, loads: Sequence[Load]
    ) -> tuple[Store, ...] | None:
        """The step's stores; None when planning them has failed."""
        planned = None
        with self._guard("plan_stores"):
            planned = scheduler.plan_stores(output, loads)
        return planned  # noqa: RET504 (the guard may have ended the block)

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def _take_received(self) -> tuple[set[str], set[str]]:
        return (set(), set()) if self._worker is None else self._worker.take_received()


def log_as(theirs: logging.Logger, ours: logging.Logger) -> None:
    """Send what `ours` logs to where the lines of `theirs` go, in the same form and from the same
    level on, unless its destination is configured already.

    vLLM gives handlers to its own logger alone. For a logger without handlers Python prints
    warnings without time or process, and nothing below a warning: an operator would not see that a
    sidecar is back.
    """
    if ours.hasHandlers():
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if theirs.handlers and not ours.level:
        ours.setLevel(theirs.level)


def _options_of(vllm_config: Any) -> ConnectorOptions:
    transfer = vllm_config.kv_transfer_config
    if not (transfer.is_kv_producer and transfer.is_kv_consumer):
        # Blocks that a load may write to are kept from the steps underway for consumers only.
        raise ConfigError(
            f'kv_role="{transfer.kv_role}": this connector both loads and stores; set kv_role to'
            ' "kv_both"'
        )
    extra = transfer.kv_connector_extra_config
    return read_options(extra, vllm_config.device_config.device_type)


def _release() -> str:
    """vLLM's version, and the generation of its GPUs, which it asks without using one in this
    process.
    """
    capability = current_platform.get_device_capability()
    return vllm.__version__ if capability is None else f"{vllm.__version__};sm{tuple(capability)}"


def _engine_id(vllm_config: Any, rank: int) -> str:
    """Names the workers that must agree on what a chunk holds: of a pipeline, those of one
    stage.
    """
    engine_id, parallel = str(vllm_config.kv_transfer_config.engine_id), vllm_config.parallel_config
    stage = rank // parallel.tensor_parallel_size
    return f"{engine_id}/stage{stage}" if parallel.pipeline_parallel_size > 1 else engine_id


def _steps_overlap(vllm_config: Any) -> bool:
    """Whether vLLM plans a step before it has heard of the one before."""
    return (
        bool(vllm_config.scheduler_config.async_scheduling)
        or vllm_config.parallel_config.pipeline_parallel_size > 1
    )


def _warn_of_policy(vllm_config: Any) -> None:
    policy = getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        logger.warning(
            'kv_load_failure_policy is "%s": a request whose KV is lost on the way then ends with'
            ' an error; "recompute" computes it',
            policy,
        )
