"""The library's figures, for Prometheus: read when it asks, counted nowhere twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from lmcache_core.telemetry import LABEL_TIER, Counters
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TIER_CHUNKS: Final = "lmcache_tier_chunks"
TIER_USED_BYTES: Final = "lmcache_tier_used_bytes"
TIER_CAPACITY_BYTES: Final = "lmcache_tier_capacity_bytes"
TIER_PENDING_BYTES: Final = "lmcache_tier_pending_bytes"
TIER_EVENTS_TOTAL: Final = "lmcache_tier_events_total"
LABEL_EVENT: Final = "event"

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
    "expired_chunks",
    "quota_refused_chunks",
    "failed_allocations",
    "corrupt_chunks",
    "missing_files",
    "failed_reads",
    "failed_writes",
    "rejected_writes",
    "dropped_writes",
    "unkept_writes",
    "damaged_at_start",
    "pulls",
    "failed_pulls",
)


class Described(NamedTuple):
    """What a counter means.

    Attributes:
        text: For people.
        label: Name of its label, "" for none.
    """

    text: str
    label: str = ""


class CounterCollector(Collector):
    """Counters of the library.

    Args:
        counters: What has been counted.
        described: Which of it is shown, by counter name.
    """

    def __init__(self, counters: Counters, described: Mapping[str, Described]) -> None:
        self._counters = counters
        self._described = described

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each counter; one without a label is there from the start."""
        values = self._counters.snapshot()
        for name, (text, label_name) in self._described.items():
            family = CounterMetricFamily(name, text, labels=[label_name] if label_name else [])
            for (counted, label), value in values.items():
                if counted == name:
                    family.add_metric([label] if label_name else [], value)
            if not label_name and not family.samples:
                family.add_metric([], 0)
            yield family


class TierCollector(Collector):
    """Figures of tiers.

    Args:
        tiers: Gives them, by tier name.
    """

    def __init__(self, tiers: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge for each size, and one counter for what happens in tiers."""
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
