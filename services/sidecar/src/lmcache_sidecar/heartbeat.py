"""What this sidecar tells the broker of its work with each heartbeat."""

from __future__ import annotations

from lmcache_core.p2p import PeerFigures
from lmcache_core.p2p.figures import MAX_COUNT, MAX_COUNTED_PEERS, bounded, tier_figures
from lmcache_core.storage.tiers import TierSet
from lmcache_core.telemetry import Counters

from lmcache_sidecar import metrics
from lmcache_sidecar.sole import SoleBytes


class HeartbeatFigures:
    """Reads the sidecar's own counters: the broker shows what `/metrics` shows.

    Args:
        tiers: The sidecar's.
        counters: What its engines asked for and got.
        sole: How much only it holds; None where nobody can be asked.
    """

    def __init__(self, tiers: TierSet, counters: Counters, sole: SoleBytes | None) -> None:
        self._tiers = tiers
        self._counters = counters
        self._sole = sole

    def __call__(self) -> PeerFigures:
        """The figures of this moment."""
        values = self._counters.snapshot()

        def by_label(name: str) -> dict[str, int]:
            return bounded(
                {
                    label: value
                    for (counted, label), value in values.items()
                    if counted == name and label
                }
            )

        return PeerFigures(
            requested_chunks=min(values.get((metrics.REQUESTED_CHUNKS_TOTAL, ""), 0), MAX_COUNT),
            loaded_chunks=by_label(metrics.LOADED_CHUNKS_TOTAL),
            loaded_bytes=by_label(metrics.LOADED_BYTES_TOTAL),
            missed_chunks=by_label(metrics.MISSED_CHUNKS_TOTAL),
            stored_chunks=min(values.get((metrics.STORED_CHUNKS_TOTAL, ""), 0), MAX_COUNT),
            stored_bytes=min(values.get((metrics.STORED_BYTES_TOTAL, ""), 0), MAX_COUNT),
            pulled_bytes=(
                {}
                if self._tiers.pulled is None
                else bounded(self._tiers.pulled.snapshot(), MAX_COUNTED_PEERS)
            ),
            tiers=tier_figures({tier.name: tier.stats() for tier in self._tiers.local}),
            sole_bytes=None if self._sole is None else self._sole.num_bytes,
        )
