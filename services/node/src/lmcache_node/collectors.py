"""Exports the library's figures to Prometheus. They are read on each scrape and not counted
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from lmcache_core.telemetry import (
    CODEC_LAST_MAX_RELATIVE_ERROR,
    CODEC_LAST_RMS_RELATIVE_ERROR,
    CODEC_WORST_MAX_RELATIVE_ERROR,
    CODEC_WORST_RMS_RELATIVE_ERROR,
    LABEL_PROFILE,
    LABEL_TIER,
    TIER_BYTES_TOTAL,
    TIER_CALLS_TOTAL,
    Counters,
    MeasuredError,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TIER_CHUNKS: Final = "lmcache_tier_chunks"
TIER_USED_BYTES: Final = "lmcache_tier_used_bytes"
TIER_CAPACITY_BYTES: Final = "lmcache_tier_capacity_bytes"
TIER_PENDING_BYTES: Final = "lmcache_tier_pending_bytes"
TIER_SECONDS_TOTAL: Final = "lmcache_tier_seconds_total"
TIER_EVENTS_TOTAL: Final = "lmcache_tier_events_total"
LABEL_EVENT: Final = "event"
LABEL_OPERATION: Final = "operation"

_GAUGES: Final = MappingProxyType(
    {
        "num_chunks": (TIER_CHUNKS, "Chunks held."),
        "used_bytes": (TIER_USED_BYTES, "Bytes taken of the tier's capacity."),
        "capacity_bytes": (TIER_CAPACITY_BYTES, "The tier's capacity."),
        "pending_write_bytes": (TIER_PENDING_BYTES, "Bytes waiting to be written to the tier."),
    }
)
_CODEC_ERRORS: Final = (
    (CODEC_LAST_MAX_RELATIVE_ERROR, "Largest error in the last chunk.", 0, "max_relative"),
    (
        CODEC_LAST_RMS_RELATIVE_ERROR,
        "Root mean square error in the last chunk.",
        0,
        "rms_relative",
    ),
    (CODEC_WORST_MAX_RELATIVE_ERROR, "Largest error in any chunk so far.", 1, "max_relative"),
    (CODEC_WORST_RMS_RELATIVE_ERROR, "Largest root mean square error so far.", 1, "rms_relative"),
)
"""Name, help text, index of the error in a profile's pair (last, worst), attribute."""
_OPERATIONS: Final = ("contains", "get", "put", "remove", "clear")
_METERED: Final = (LABEL_TIER, LABEL_OPERATION)
TIER_EVENTS: Final = (
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
    "renewed_pulls",
    "failed_over_chunks",
    "pulled_chunks",
    "pulled_bytes",
    "mover_chunks",
    "failed_mover_reads",
    "mover_starts",
    "refused_encodings",
)


def exported_name(counter: str) -> str:
    """Return the metric of a counter: counters are integers, of microseconds; metrics are in
    seconds.
    """
    return counter.replace("_microseconds_", "_seconds_")


class Described(NamedTuple):
    """The description of a counter.

    Attributes:
        label: Name of its label, "" for none.
        values: Label values that are exported as 0 from the start: Prometheus does not see an
            increase in a series that first appears at 1.
    """

    text: str
    label: str = ""
    values: tuple[str, ...] = ()


@dataclass(eq=False)
class CounterCollector(Collector):
    """Exports counters of the library.

    Attributes:
        described: Those to export, by counter name.
    """

    counters: Counters
    described: Mapping[str, Described]

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each counter; counters without labels and known label values appear
        from the start.
        """
        counted = self.counters.snapshot()
        for name, (text, label_name, known) in self.described.items():
            exported = exported_name(name)
            unit = 1 if exported == name else 1e6
            family = CounterMetricFamily(exported, text, labels=[label_name] if label_name else [])
            shown = dict.fromkeys(known if label_name else ("",), 0) | {
                label: value for (of, label), value in counted.items() if of == name
            }
            for label, value in shown.items():
                family.add_metric([label] if label_name else [], value / unit)
            yield family


@dataclass(eq=False)
class TierCollector(Collector):
    """Exports figures of tiers.

    Attributes:
        tiers: Returns the figures, by tier name.
    """

    tiers: Callable[[], Mapping[str, Mapping[str, int]]]

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge for each size, a counter of events in tiers, and for metered tiers the
        calls, their duration and their bytes.
        """
        tiers = self.tiers()
        for figure, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=[LABEL_TIER])
            for tier, figures in tiers.items():
                if figure in figures:
                    gauge.add_metric([tier], figures[figure])
            yield gauge
        events = CounterMetricFamily(
            TIER_EVENTS_TOTAL, "Events in a tier.", labels=[LABEL_TIER, LABEL_EVENT]
        )
        for tier, figures in tiers.items():
            for event in TIER_EVENTS:
                if event in figures:
                    events.add_metric([tier, event], figures[event])
        yield events
        calls = CounterMetricFamily(TIER_CALLS_TOTAL, "Calls of a tier.", labels=_METERED)
        num_bytes = CounterMetricFamily(
            TIER_BYTES_TOTAL, "Bytes of records read from or written to a tier.", labels=_METERED
        )
        seconds = CounterMetricFamily(
            TIER_SECONDS_TOTAL, "Time spent in calls of a tier.", labels=_METERED
        )
        for tier, figures in tiers.items():
            for operation in _OPERATIONS:
                if f"{operation}_calls" in figures:
                    labels = [tier, operation]
                    calls.add_metric(labels, figures[f"{operation}_calls"])
                    num_bytes.add_metric(labels, figures.get(f"{operation}_bytes", 0))
                    seconds.add_metric(labels, figures.get(f"{operation}_microseconds", 0) / 1e6)
        yield from (calls, num_bytes, seconds)


@dataclass(eq=False)
class CodecErrorCollector(Collector):
    """Exports how much decoded values differ from the stored ones, as measured by encoders.

    Attributes:
        errors: Returns the last and the worst errors, by profile.
    """

    errors: Callable[[], Mapping[str, tuple[MeasuredError, MeasuredError]]]

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge for the last and the worst of each error."""
        for name, text, which, figure in _CODEC_ERRORS:
            gauge = GaugeMetricFamily(name, text, labels=[LABEL_PROFILE])
            for profile, errors in self.errors().items():
                gauge.add_metric([profile], getattr(errors[which], figure))
            yield gauge
