"""The lookup service's own metrics."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter

REQUESTED_CHUNKS_TOTAL: Final = "lmcache_lookup_requested_chunks_total"
FOUND_CHUNKS_TOTAL: Final = "lmcache_lookup_found_chunks_total"
DEGRADED_ANSWERS_TOTAL: Final = "lmcache_lookup_degraded_answers_total"
EVENTS_TOTAL: Final = "lmcache_lookup_events_total"
RESYNCS_TOTAL: Final = "lmcache_lookup_resyncs_total"
DROPPED_CHUNKS_TOTAL: Final = "lmcache_lookup_dropped_chunks_total"
SWEPT_ENTRIES_TOTAL: Final = "lmcache_lookup_swept_entries_total"


class LookupMetrics:
    """Counters of one app."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requested_chunks = Counter(
            REQUESTED_CHUNKS_TOTAL, "Chunks queried.", registry=registry
        )
        self.found_chunks = Counter(
            FOUND_CHUNKS_TOTAL, "Chunks in the prefixes that were found.", registry=registry
        )
        self.degraded_answers = Counter(
            DEGRADED_ANSWERS_TOTAL, "Answers given without the index.", registry=registry
        )
        self.events = Counter(EVENTS_TOTAL, "Stores and removals applied.", registry=registry)
        self.resyncs = Counter(
            RESYNCS_TOTAL, "Instances asked to announce everything again.", registry=registry
        )
        self.dropped_chunks = Counter(
            DROPPED_CHUNKS_TOTAL,
            "Chunks with a live holder, dropped because the index was full.",
            registry=registry,
        )
        self.swept_entries = Counter(
            SWEPT_ENTRIES_TOTAL, "Entries of ended leases that were cleared.", registry=registry
        )
