"""vLLM's connector interface: each call goes to the scheduler's or a worker's side.

A failure inside a call is logged and counted, and the call answers as if nothing were cached. Only
a configuration that cannot work is refused, when the engine starts.

Source: `vllm/distributed/kv_transfer/kv_connector/v1/base.py` of vLLM 0.27.1 and later; what
    differs between them is looked up by name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import vllm
from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.platforms import current_platform

from lmcache_core._typing import override
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.engine.stores import SidecarClient
from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.integrations.connector_options import PREFIX
from lmcache_core.integrations.vllm.groups import (
    cache_groups,
    check_chunk_size,
    check_packing,
    fails_by_block,
    largest_chunk_bytes,
)
from lmcache_core.integrations.vllm.identity import identity_of
from lmcache_core.integrations.vllm.kv_settings import set_variables
from lmcache_core.integrations.vllm.logs import log_as_vllm
from lmcache_core.integrations.vllm.memory import attention_backends, create_scales
from lmcache_core.integrations.vllm.options import read_options
from lmcache_core.integrations.vllm.plan import StepPlan, Store, WorkerReport
from lmcache_core.integrations.vllm.requests import RequestNamer, Role
from lmcache_core.integrations.vllm.scheduler import SchedulerSide
from lmcache_core.integrations.vllm.stats import (
    DESCRIBED,
    GAUGES,
    HIT_SOURCE,
    LMCachePromMetrics,
    LMCacheStats,
    hit_sources,
)
from lmcache_core.integrations.vllm.stores import OpenStore, open_store
from lmcache_core.integrations.vllm.worker import RefusingWorker, WorkerSide
from lmcache_core.serde.device import device_encodings
from lmcache_core.telemetry import Counters

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lmcache_core.integrations.vllm.event_publisher import RouterEvents

T = TypeVar("T")

SIDECAR_HINT = f'run a sidecar, and set "{PREFIX}sidecar_socket" to its socket'
HAS_TRANSFER_RESULTS = hasattr(base.KVConnectorBase_V1, "get_transfer_results")
"""Since 0.30 a failed load can be reported by request (`fails_by_block`). To a connector without
`SupportsHMA`, a model with several groups appears as one group.
"""
SAYS_STATES = hasattr(base.KVConnectorBase_V1, "register_finished_partial_tail")
"""Since 0.32 each step says which blocks hold recurrent state at their end."""
BASES: tuple[type, ...] = (base.KVConnectorBase_V1,)
if HAS_TRANSFER_RESULTS:
    BASES += (base.SupportsHMA,)


class LMCacheConnector(*BASES):  # type: ignore[misc]
    """See the package's documentation and `docs/vllm.md`.

    Raises:
        ConfigError: An option is wrong.
        ValueError: A chunk would not be whole blocks.
    """

    _cache_hit_source = HIT_SOURCE

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        self._counters = Counters()
        self._guard = DegradingGuard(self._counters, raised=())
        self._told = dict.fromkeys((*DESCRIBED, *GAUGES), 0)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | RefusingWorker | None = None
        self._worker_side: WorkerSide | None = None
        self._open_store: OpenStore | None = None
        self._events: RouterEvents | None = None
        is_worker = self.role is base.KVConnectorRole.WORKER
        is_open = False
        try:
            # What a newer vLLM calls otherwise fails here: it must not end the engine.
            with DegradingGuard(self._counters, raised=(ConfigError, ValueError))("start"):
                self._open(vllm_config, kv_cache_config, is_worker)
                is_open = True
        except LayoutError as exc:
            logger.error("model served without the cache: reason=%s", exc)
        if not is_open:
            self._scheduler = self._worker_side = None
            # The scheduler's side may not know of this, and promise loads.
            refusing = RefusingWorker(reports_blocks=not HAS_TRANSFER_RESULTS)
            self._worker = refusing if is_worker else None

    def _open(self, vllm_config: Any, kv_cache_config: Any, is_worker: bool) -> None:
        transfer = vllm_config.kv_transfer_config
        device_type = vllm_config.device_config.device_type
        options = read_options(transfer.kv_connector_extra_config, device_type)
        parallel = vllm_config.parallel_config
        groups = cache_groups(kv_cache_config)
        check_chunk_size(groups, options.engine.chunk_size)
        check_packing(groups, options.layout)
        if not fails_by_block(groups) and not HAS_TRANSFER_RESULTS:
            raise LayoutError(
                "the model has only sliding windows: vLLM before 0.30 does not accept reports of"
                " their failed loads"
            )
        if any(group.is_state for group in groups) and not SAYS_STATES:
            raise LayoutError(
                "the model has recurrent state: vLLM before 0.32 does not say which blocks hold it"
            )
        if getattr(vllm_config.cache_config, "use_replayssm", False):
            raise LayoutError(
                "use_replayssm: a part of the recurrent state is outside of the blocks"
            )
        if options.engine.sidecar_socket is None and parallel.world_size > 1:
            raise ConfigError(
                f"a cache inside vLLM serves one worker, not {parallel.world_size}: {SIDECAR_HINT}"
            )
        release = vllm.__version__
        capability = current_platform.get_device_capability()  # queried without using a GPU
        if capability is not None:
            release += f";sm{tuple(capability)}"
        identity = identity_of(
            *(
                vllm_config,
                kv_cache_config,
                groups,
                options,
                release,
                set_variables(envs.environment_variables),
            ),
            is_worker=is_worker,
        )
        namer = RequestNamer(identity, options.engine.chunk_size)
        rank = parallel.rank if is_worker else 0
        # Workers with the same name must agree on a chunk's content: within a pipeline, those of
        # one stage.
        engine_id = str(transfer.engine_id)
        if parallel.pipeline_parallel_size > 1:
            engine_id += f"/stage{rank // parallel.tensor_parallel_size}"
        client = SidecarClient(
            f"vllm/{engine_id}",
            () if is_worker else tuple(group.name for group in groups),
            loads_beside=is_worker,
            decodes=device_encodings(device_type) if is_worker else (),
            chunk_bytes=largest_chunk_bytes(groups, options.engine.chunk_size),
            role=str(transfer.kv_role),
        )
        metadata = replace(identity.metadata, worker_id=identity.rank_of(rank))
        self._open_store = open_store(
            client, options.engine, metadata, self._counters, namer.use_salt
        )
        store = self._open_store.store
        if is_worker:
            self._worker_side = WorkerSide(
                options,
                groups,
                identity,
                rank,
                store,
                self._counters,
                self._guard,
                is_told_late=overwrites_early(vllm_config, kv_cache_config),
                has_neighbours=self._has_neighbours,
            )
            self._worker = RefusingWorker(self._worker_side.reports_blocks)
            return
        policy = getattr(transfer, "kv_load_failure_policy", "recompute")
        if policy != "recompute":
            logger.warning(
                'a request whose load fails will end with an error, "recompute" would compute it'
                " instead: kv_load_failure_policy=%s",
                policy,
            )
        if self._open_store.is_alone:
            logger.error(
                "this worker runs in another process and cannot use a cache inside vLLM: %s",
                SIDECAR_HINT,
            )
        role = Role(loads=transfer.is_kv_consumer, stores_prompts=transfer.is_kv_producer)
        self._scheduler = SchedulerSide(
            options, groups, identity, store, namer, self._counters, role
        )
        if options.kv_events:
            from lmcache_core.integrations.vllm.event_publisher import RouterEvents

            try:
                self._events = RouterEvents(
                    vllm_config, options, groups, identity, namer, self._guard
                )
            except LayoutError as exc:  # the cache serves without routers
                logger.warning("routers learn nothing of the cache: reason=%s", exc)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost store is only a later miss."""
        return False

    @override
    def shutdown(self) -> None:
        if self._worker_side is not None:
            self._worker_side.close()
        if self._events is not None:
            self._events.close()
        if self._open_store is not None:
            self._open_store.close()

    @override
    def get_kv_connector_stats(self) -> LMCacheStats | None:
        last, self._told = self._told, {name: self._counters.value(name) for name in self._told}
        growth: dict[str, Any] = {
            name: value - last[name] for name, value in self._told.items() if value != last[name]
        }
        growth |= self._counters.take_observed()
        return LMCacheStats(data=growth) if growth else None

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
        """Return the layout that `kv_cache_layout` asks for; any layout works."""
        extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        return extra.get(PREFIX + "kv_cache_layout") or extra.get("kv_cache_layout")

    def _ask(self, name: str, call: Callable[[SchedulerSide], T], otherwise: T) -> T:
        if self._scheduler is not None:
            with self._guard(name):
                return call(self._scheduler)
        return otherwise

    @override
    def on_new_request(self, request: Any) -> None:
        self._ask("new_request", lambda side: side.new_request(request), None)

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        nothing: tuple[int | None, bool] = (0, False)
        return self._ask(
            "lookup", lambda side: side.num_matched(request, num_computed_tokens), nothing
        )

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        # Not guarded: a promised load must be planned, or vLLM would use blocks that are never
        # loaded. It does not ask the store.
        with self._guard("allocated") if num_external_tokens == 0 else nullcontext():
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @override
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        return self._ask(
            "sources", lambda side: hit_sources(side.origins_of(request, num_external_tokens)), {}
        )

    @override
    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        scheduler = self._scheduler
        if scheduler is None:
            return StepPlan()
        # Not guarded: what vLLM was promised must be loaded or reported as failed.
        loads = scheduler.plan_loads()
        stores: tuple[Store, ...] | None = self._ask(
            "plan_stores", lambda side: side.plan_stores(scheduler_output, loads), None
        )
        overwritten: frozenset[str] | None = None
        if stores is None:
            scheduler.stores.lose_track()
        else:
            overwritten = scheduler.stores.take_overwritten()
        waits = scheduler.waits_for_loads(scheduler_output)
        recompute_s, step, held = scheduler.recompute_s, scheduler.step, scheduler.take_held()
        return StepPlan(loads, stores or (), waits, recompute_s, step, held, overwritten)

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        report: WorkerReport | None = connector_output.kv_connector_worker_meta
        received = connector_output.finished_recving or ()
        self._ask("step", lambda side: side.step_done(report, received), None)

    @override
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_held = self._ask("hold", lambda side: side.hold(request), False)
        return is_held, self._ask("finish", lambda side: side.finished(request), None)

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Stop using everything cached so far: weights may have been replaced. It stays in the
        store for other engines.
        """
        if self._scheduler is not None:
            self._scheduler.begin_epoch()
        if self._events is not None:
            self._events.forget()
        return True

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker_side is None:
            return
        with self._guard("attach"):
            try:
                create_scales(self._vllm_config, kv_caches)
                backends_of = functools.partial(attention_backends, self._vllm_config)
                num_blocks = self._kv_cache_config.num_blocks
                self._worker_side.register(kv_caches, num_blocks, backends_of)
                self._worker = self._worker_side
            except LayoutError as exc:
                logger.error("this worker neither loads nor stores: reason=%s", exc)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True: vLLM's memory may be unmapped, and mapped again. Called since 0.33."""
        return True

    def _has_neighbours(self) -> bool:
        """Return whether this is one of several connectors, as `MultiConnector` has them."""
        return has_kv_transfer_group() and get_kv_transfer_group() is not self

    def unregister_kv_caches(self) -> None:
        """Wait for copies: vLLM is about to unmap its memory, to sleep. Called since 0.33."""
        if self._worker_side is not None:
            self._worker_side.wait_for_copies()

    def restore_kv_caches(self) -> None:
        """Do nothing: the memory is mapped again at the same addresses. Called since 0.33."""

    @override
    def handle_preemptions(self, kv_connector_metadata: StepPlan) -> None:
        if self._worker is not None:
            self._worker.before_overwriting(kv_connector_metadata)

    @override
    def bind_connector_metadata(self, connector_metadata: StepPlan) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(connector_metadata)

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: what a step needs was loaded before the step."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: chunks are copied out once, behind the step."""

    @override
    def wait_for_save(self) -> None:
        if self._worker is not None and self.has_connector_metadata():
            self._worker.store(self._get_connector_metadata())

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return self._worker.take_sent() or None, self._worker.take_received()[0] or None

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._worker is None:
            return base.KVConnectorTransferResults()
        received, failed = self._worker.take_received()
        return base.KVConnectorTransferResults(
            finished_sending=self._worker.take_sent(),
            finished_recving=received,
            failed_recving=set() if self._worker.reports_blocks else failed,
        )

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_bad_blocks()

    @override
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return None if self._worker is None else self._worker.take_report()


def overwrites_early(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return whether vLLM uses blocks otherwise before it tells the connector: its model runner V2
    zeroes those that a step takes where it has recurrent state or several precisions, and copies to
    them where a hit may end inside a block; before 0.33, sleep mode unmaps all, once the device is
    idle.

    Source: `update_requests` and `pre_forward` in `vllm/v1/worker/gpu/model_runner.py`, 0.27 to
        0.33.
    """
    sleeps = getattr(vllm_config.model_config, "enable_sleep_mode", False)
    if sleeps and not hasattr(base.KVConnectorBase_V1, "unregister_kv_caches"):
        return True
    if not getattr(vllm_config, "use_v2_model_runner", False):
        return False
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    hits_parts = len({getattr(spec, "block_size", None) for spec in specs}) > 1 or bool(
        getattr(vllm_config.cache_config, "prefix_match_unit", None)
    )
    return hits_parts or getattr(kv_cache_config, "needs_kv_cache_zeroing", True)
