"""What this sidecar tells the broker of its work with each heartbeat."""

from __future__ import annotations

import os

from lmcache_core.p2p import PeerFigures
from lmcache_core.p2p.messages import MAX_COUNT, MAX_COUNTED_PEERS, bounded, tier_figures
from lmcache_core.storage.tiers import TierSet
from lmcache_core.telemetry import Counters

from lmcache_sidecar import metrics


def machine_load() -> float:
    """Return processes that want to run, over the last minute, for each processor: 0 (idle) to 1
    (all of them busy).
    """
    return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def heartbeat_figures(
    tiers: TierSet, counters: Counters, exclusive_bytes: int | None
) -> PeerFigures:
    """Read the figures of this moment from the sidecar's counters, so that the broker shows what
    `/metrics` shows.

    Args:
        tiers: Of this sidecar.
        counters: What its engines asked for and got.
        exclusive_bytes: How much only this sidecar holds; None where that is not known.
    """
    values = counters.snapshot()

    def by_label(name: str) -> dict[str, int]:
        return bounded(
            {label: value for (of, label), value in values.items() if of == name and label}
        )

    return PeerFigures(
        requested_chunks=min(values.get((metrics.REQUESTED_CHUNKS_TOTAL, ""), 0), MAX_COUNT),
        loaded_chunks=by_label(metrics.LOADED_CHUNKS_TOTAL),
        loaded_bytes=by_label(metrics.LOADED_BYTES_TOTAL),
        missed_chunks=by_label(metrics.MISSED_CHUNKS_TOTAL),
        stored_chunks=min(values.get((metrics.STORED_CHUNKS_TOTAL, ""), 0), MAX_COUNT),
        stored_bytes=min(values.get((metrics.STORED_BYTES_TOTAL, ""), 0), MAX_COUNT),
        pulled_bytes=(bounded(tiers.pulled or {}, MAX_COUNTED_PEERS)),
        tiers=tier_figures({tier.name: tier.stats() for tier in tiers.local}),
        sole_bytes=exclusive_bytes,
    )
