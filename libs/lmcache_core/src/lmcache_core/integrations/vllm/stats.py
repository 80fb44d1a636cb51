"""Figures for vLLM's log line and its Prometheus endpoint, and where hits came from."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_core._typing import override
from lmcache_core.record import StagedFrom
from lmcache_core.telemetry import (
    FAILED_CALLS_TOTAL,
    IGNORED_WISHES_TOTAL,
    LOAD_BYTES,
    LOAD_SECONDS,
    LOOKUP_SECONDS,
    MISSED_CHUNKS_TOTAL,
    PINNED_BYTES,
    RETRIEVED_BYTES_TOTAL,
    RETRIEVED_CHUNKS_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORE_BYTES,
    STORE_SECONDS,
    STORED_BYTES_TOTAL,
    STORED_CHUNKS_TOTAL,
    UNSTORED_CHUNKS_TOTAL,
)

DESCRIBED = MappingProxyType(
    {
        RETRIEVED_TOKENS_TOTAL: "Tokens whose KV was loaded, on each worker.",
        RETRIEVED_CHUNKS_TOTAL: "Chunks loaded.",
        RETRIEVED_BYTES_TOTAL: "Bytes loaded.",
        MISSED_CHUNKS_TOTAL: "Chunks that should have been loaded but could not be.",
        STORED_CHUNKS_TOTAL: "Chunks stored.",
        STORED_BYTES_TOTAL: "Bytes stored.",
        UNSTORED_CHUNKS_TOTAL: "Chunks that found no room in the store.",
        FAILED_CALLS_TOTAL: "Calls of the connector that failed; vLLM continued without the cache.",
        IGNORED_WISHES_TOTAL: "Values in kv_transfer_params that are neither true nor false.",
    }
)
GAUGES = MappingProxyType(
    {PINNED_BYTES: "Bytes of the sidecar's shared memory that are pinned, over all workers."}
)
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
BYTES = tuple(1e5 * 4**power for power in range(10))
OBSERVED = MappingProxyType(
    {
        LOAD_SECONDS: ("Time of a load into vLLM's blocks.", SECONDS),
        LOAD_BYTES: ("Size of a load.", BYTES),
        STORE_SECONDS: ("Time of a store, until its chunks are there.", SECONDS),
        STORE_BYTES: ("Size of a store.", BYTES),
        LOOKUP_SECONDS: ("Time until it was known what a request can load.", SECONDS),
    }
)
"""Histograms, and their buckets."""
PROMETHEUS_PREFIX = "vllm:"
CONNECTOR = ("LMCacheConnector", "lmcache_core.integrations.vllm", "LMCacheConnector")
"""Name, module and class."""

_SOURCE_NAMES: Mapping[int, str] = {
    StagedFrom.HOT: "HOST",
    StagedFrom.DISK: "DISK",
    StagedFrom.PEER: "P2P",
}


@dataclass
class LMCacheStats(KVConnectorStats):
    """The increase of the counters in `DESCRIBED`, the change of `GAUGES`, and the measurements of
    `OBSERVED`, by name.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return the field of that name: vLLM 0.27's `MultiConnector` treats statistics that never
        left the process as a dictionary.
        """
        return getattr(self, name)

    @override
    def reset(self) -> None:
        self.data = {}

    @override
    def is_empty(self) -> bool:
        return not any(self.data.values())

    @override
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, more in other.data.items():
            self.data[name] = self.data[name] + more if name in self.data else more
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        figures = {}
        for name, amount in self.data.items():
            short = name.removeprefix("lmcache_").removesuffix("_total")
            if isinstance(amount, list):
                figures[f"mean_{short}"] = statistics.fmean(amount)
            elif amount:
                figures[short] = amount
        return figures


class LMCachePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter, gauge or histogram per statistic, named `vllm:lmcache_…`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # The process of vLLM's HTTP server finds the statistics of a `MultiConnector`'s children by
        # class name, and exits if one is unknown, as those of connectors loaded by module path are.
        with contextlib.suppress(ValueError):  # registered by an earlier engine
            KVConnectorFactory.register_connector(*CONNECTOR)
        kind, histogram = metric_types[Counter], metric_types[Histogram]
        self._metrics = {}
        self._histograms = {}
        self._gauges = {}
        self._sums: dict[tuple[str, int], int] = {}
        for name, text in GAUGES.items():
            metric = metric_types[Gauge](
                name=PROMETHEUS_PREFIX + name,
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="sum",  # each process of vLLM's server is told a part
            )
            self._gauges[name] = {
                index: metric.labels(*values) for index, values in per_engine_labelvalues.items()
            }
        for name, (text, buckets) in OBSERVED.items():
            metric = histogram(
                name=PROMETHEUS_PREFIX + name,
                documentation=text,
                buckets=buckets,
                labelnames=labelnames,
            )
            self._histograms[name] = {
                index: metric.labels(*values) for index, values in per_engine_labelvalues.items()
            }
        for name, text in DESCRIBED.items():
            metric = kind(
                name=PROMETHEUS_PREFIX + name.removesuffix("_total"),
                documentation=text,
                labelnames=labelnames,
            )
            self._metrics[name] = {
                index: metric.labels(*values) for index, values in per_engine_labelvalues.items()
            }

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if name in self._metrics:
                self._metrics[name][engine_idx].inc(amount)
            elif name in self._gauges:
                present = self._sums[name, engine_idx] = (
                    self._sums.get((name, engine_idx), 0) + amount
                )
                self._gauges[name][engine_idx].set(present)  # Ray's gauges have no `inc`
            for value in amount if name in self._histograms else ():
                self._histograms[name][engine_idx].observe(value)


_Sources: Any = None
if importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is not None:  # since 0.32
    _Sources = importlib.import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource
HIT_SOURCE = getattr(_Sources, "HOST", None)
"""Source of a hit unless stated otherwise."""


def hit_sources(origins: Mapping[int, int]) -> dict[Any, int]:
    """Return tokens by vLLM's source, from tokens by `StagedFrom`; an unknown value from a later
    sidecar counts as a source without a name.
    """
    counts: dict[Any, int] = {}
    for origin, num_tokens in origins.items():
        source = getattr(_Sources, _SOURCE_NAMES.get(origin, "EXTERNAL_UNSPECIFIED"))
        counts[source] = counts.get(source, 0) + num_tokens
    return counts
