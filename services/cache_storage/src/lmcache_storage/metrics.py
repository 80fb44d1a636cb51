"""The storage's figures, for Prometheus. Names are constants here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from lmcache_core.telemetry import LABEL_REASON, LABEL_TIER, Counters
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SERVED_CHUNKS_TOTAL: Final = "lmcache_storage_served_chunks_total"
SERVED_BYTES_TOTAL: Final = "lmcache_storage_served_bytes_total"
MISSED_CHUNKS_TOTAL: Final = "lmcache_storage_missed_chunks_total"
STORED_CHUNKS_TOTAL: Final = "lmcache_storage_stored_chunks_total"
STORED_BYTES_TOTAL: Final = "lmcache_storage_stored_bytes_total"
REFUSED_CHUNKS_TOTAL: Final = "lmcache_storage_refused_chunks_total"
REMOVED_CHUNKS_TOTAL: Final = "lmcache_storage_removed_chunks_total"
TIER_CHUNKS: Final = "lmcache_storage_tier_chunks"
TIER_USED_BYTES: Final = "lmcache_storage_tier_used_bytes"
TIER_CAPACITY_BYTES: Final = "lmcache_storage_tier_capacity_bytes"
TIER_PENDING_BYTES: Final = "lmcache_storage_tier_pending_bytes"
TIER_EVENTS_TOTAL: Final = "lmcache_storage_tier_events_total"
LABEL_EVENT: Final = "event"

_COUNTED: Final = MappingProxyType(
    {
        SERVED_CHUNKS_TOTAL: ("Chunks sent, by the tier that had them.", (LABEL_TIER,)),
        SERVED_BYTES_TOTAL: ("Bytes of records sent, by the tier that had them.", (LABEL_TIER,)),
        MISSED_CHUNKS_TOTAL: ("Chunks asked for and not sent, by the reason.", (LABEL_REASON,)),
        STORED_CHUNKS_TOTAL: ("Chunks taken.", ()),
        STORED_BYTES_TOTAL: ("Bytes of records taken.", ()),
        REFUSED_CHUNKS_TOTAL: ("Chunks not taken, for want of room or while draining.", ()),
        REMOVED_CHUNKS_TOTAL: ("Chunks removed on request.", ()),
    }
)
_GAUGES: Final = MappingProxyType(
    {
        "num_chunks": (TIER_CHUNKS, "Chunks held."),
        "used_bytes": (TIER_USED_BYTES, "Bytes taken of the tier's capacity."),
        "capacity_bytes": (TIER_CAPACITY_BYTES, "The tier's capacity."),
        "pending_write_bytes": (TIER_PENDING_BYTES, "Bytes that wait to be written to the tier."),
    }
)
_EVENTS: Final = (
    "evicted_chunks",
    "failed_allocations",
    "corrupt_chunks",
    "missing_files",
    "failed_reads",
    "failed_writes",
    "rejected_writes",
    "dropped_writes",
    "damaged_at_start",
)


class StorageCollector(Collector):
    """Reads the figures when Prometheus asks.

    Args:
        counters: What has been counted, under the names above.
        tiers: The figures of all tiers, by their names.
    """

    def __init__(self, counters: Counters, tiers: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        self._counters = counters
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the storage."""
        values = self._counters.snapshot()
        for name, (text, labels) in _COUNTED.items():
            family = CounterMetricFamily(name, text, labels=labels)
            for (counted, label), value in values.items():
                if counted == name:
                    family.add_metric([label] if labels else [], value)
            if not labels and not family.samples:
                family.add_metric([], 0)
            yield family
        yield from self._collect_tiers()

    def _collect_tiers(self) -> Iterator[Metric]:
        tiers = self._tiers()
        for figure, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=[LABEL_TIER])
            for tier, figures in tiers.items():
                if figure in figures:
                    gauge.add_metric([tier], figures[figure])
            yield gauge
        events = CounterMetricFamily(TIER_EVENTS_TOTAL, "What happened in a tier.", labels=[LABEL_TIER, LABEL_EVENT])
        for tier, figures in tiers.items():
            for event in _EVENTS:
                if event in figures:
                    events.add_metric([tier, event], figures[event])
        yield events
