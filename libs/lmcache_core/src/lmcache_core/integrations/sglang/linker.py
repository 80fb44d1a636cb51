"""SGLang's interface to an external cache: each call goes to `PageCache`.

A lookup verifies and holds what it finds, so that a load copies out of mapped memory, which
outlives the sidecar: SGLang ends a request whose load fails with an error.

Source: `mem_cache/unified_cache/unified_cache_linker.py` of SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sglang
import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from lmcache_core.concurrency import Workers
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.engine.stores import SidecarClient, create_chunk_store
from lmcache_core.engine.transfer import KVTransfer
from lmcache_core.errors import ConfigError, LayoutError
from lmcache_core.gpu_connectors import PagedGPUConnector, run_canary
from lmcache_core.gpu_connectors.engine_memory import LogicalMemory
from lmcache_core.gpu_connectors.staging import Staging
from lmcache_core.gpu_connectors.streams import has_streams
from lmcache_core.integrations.connector_options import PREFIX, OptionReader
from lmcache_core.integrations.sglang.identity import Ranks, identity_of
from lmcache_core.integrations.sglang.page_cache import PageCache
from lmcache_core.integrations.sglang.pools import pool_of
from lmcache_core.integrations.sglang.server_settings import set_variables
from lmcache_core.telemetry import Counters

logger = logging.getLogger(__name__)

READER = OptionReader("unified_cache_external_linker_config", "SGLang")
UPDATES = "begin_weight_update", "update_weights_from"
"""How the methods begin by which weights are replaced."""
MIN_PAGE_SIZE = 16
"""A page is a record of the cache: smaller ones would cost more than they save."""


class LMCacheLinker(UnifiedCacheLinker):
    """See the package's documentation and `docs/sglang.md`.

    Raises:
        ConfigError: An option is wrong.
        LayoutError: The model's KV cannot be cached.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: Mapping[str, Any],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        own, config = READER.read(extra_config)
        if config.sidecar_socket is None:
            raise ConfigError(
                f'{READER.place}: set "{PREFIX}sidecar_socket": the ranks of SGLang are processes,'
                " which share a cache only through a sidecar"
            )
        self.forward_stream = forward_stream
        if components != {ComponentType.FULL}:
            names = sorted(component.name for component in components)
            raise LayoutError(
                f"the model's KV has the parts {', '.join(names)}; only FULL can be cached"
            )
        if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
            raise LayoutError("speculative_algorithm: drafts have KV of their own")
        page_size = int(params.page_size)
        if page_size < MIN_PAGE_SIZE:
            raise ConfigError(
                f"page_size={page_size}: each page is stored on its own; set it to"
                f" {MIN_PAGE_SIZE} or more, 64 is a good size"
            )
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        pool = pool_of(kvcache, page_size)
        ranks = _ranks(params)
        metadata = identity_of(
            server_args.resolved_dict(),
            _model_config(server_args),
            pool,
            ranks,
            set_variables(),
            sglang.__version__,
            own,
        )
        counters = Counters()
        self._guard = DegradingGuard(counters, raised=())
        self._workers = Workers("lmcache-digest")
        client = SidecarClient(
            f"sglang/{socket.gethostname()}:{os.getppid()}",
            groups=(),
            loads_beside=True,
            chunk_bytes=pool.layout.num_bytes(page_size),
        )
        self._store = create_chunk_store(config, metadata, None, counters, self._workers, client)
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(pool.num_layers)
        staging = Staging()
        connector = PagedGPUConnector(
            pool.layout, page_size if has_streams(pool.device) else 0, staging
        )
        transfer = KVTransfer(self._store, connector, metadata, counters, self._workers)
        self._pages = PageCache(
            self._store,
            transfer,
            connector,
            pool,
            metadata,
            page_size,
            self._guard,
            stores=not pool.is_latent or ranks.rank == 0,
            tokens_per_s=config.prefill_tokens_per_s,
            timeout_s=config.tier_timeout_s,
        )
        self._workers.open()
        self._store.open(self._pages.use_salt)
        run_canary(
            PagedGPUConnector(pool.layout, staging=staging),
            pool.kvcaches,
            LogicalMemory(pool.layout, pool.kvcaches),
            transfer.through_store,
        )
        if has_streams(pool.device):
            self._store.pin_memory(pool.device)
        self._pages.open()
        _watch_weights(self._pages.begin_epoch)
        logger.info(
            "pages are cached: model=%s page_size=%d rank=%d of %d",
            metadata.model_name,
            page_size,
            ranks.rank,
            ranks.size,
        )

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Return every number of pages, from the first, that a load can restore."""
        keys = _keys_of(transfers)
        found = 0
        with self._guard("lookup"):
            found = self._pages.lookup(rid, keys)
        return list(range(1, found + 1))

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queue a load; the same on every rank, whatever this one holds."""
        keys = _keys_of(transfers)
        if not keys:
            return False
        self._pages.queue_load(rid, keys, _slots_of(transfers))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not begun."""
        return self._pages.cancel_load(rid)

    def start_layer_wise_loading(self) -> int:
        """Begin the queued loads."""
        loads, counter = self._pages.take_queued(), self.layer_done_counter
        if not loads:
            return -1
        index: int = counter.update_producer()

        def loaded(layers: Iterable[int]) -> None:
            for layer in layers:
                counter.complete(index, layer)

        self._pages.start_loads(loads, loaded, functools.partial(counter.fail, index))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for a batch of loads; return whether all pages are there."""
        return bool(self.layer_done_counter.finish(counter_index))

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Queue pages to be stored; the same on every rank, whether this one can store or not."""
        keys = _keys_of(transfers)
        if not keys:
            return False
        self._pages.store(keys, _slots_of(transfers), self.record_offload_ready())
        return True

    def num_completed_offloads(self) -> int:
        """Return how many stores have ended."""
        return self._pages.num_stored

    def pop_completed_offload(self) -> bool:
        """Return whether the oldest of them was complete."""
        return self._pages.take_stored()

    def reset(self) -> None:
        """Wait for all copies, and forget what was cached: the weights may have been replaced."""
        self._pages.reset()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Wait for all copies, and leave the sidecar."""
        self._pages.close()
        self._store.close()
        self._workers.close()


def _keys_of(transfers: Sequence[Any]) -> Sequence[str]:
    (transfer,) = transfers
    return transfer.keys or ()


def _slots_of(transfers: Sequence[Any]) -> torch.Tensor:
    (transfer,) = transfers
    slots: torch.Tensor = transfer.device_indices
    return slots.to(torch.int64)


def _watch_weights(change: Callable[[], None]) -> None:
    """Call `change` before SGLang replaces weights, which it may do without flushing its cache."""
    names = [name for name in vars(SchedulerWeightUpdaterManager) if name.startswith(UPDATES)]
    if not all(any(name.startswith(update) for name in names) for update in UPDATES):
        raise LayoutError("this SGLang replaces weights in a way that the linker cannot see")
    for name in names:
        update = getattr(SchedulerWeightUpdaterManager, name)

        def changing(*args: Any, update: Any = update, **more: Any) -> Any:
            change()
            return update(*args, **more)

        setattr(SchedulerWeightUpdaterManager, name, functools.wraps(update)(changing))


def _ranks(params: Any) -> Ranks:
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not torch.distributed.is_initialized():
        return Ranks()
    return Ranks(torch.distributed.get_rank(group), torch.distributed.get_world_size(group))


def _model_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)
