"""The broker's figures, for Prometheus. Names are constants here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_broker.discovery import Discovering
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.transfers.hot import HotChunks
from lmcache_broker.transfers.scheduler import TransferScheduler
from lmcache_broker.transfers.service import TransferFigures

PEERS: Final = "lmcache_broker_peers"
DRAINING_PEERS: Final = "lmcache_broker_draining_peers"
PULLS_IN_FLIGHT: Final = "lmcache_broker_pulls_in_flight"
PULLS_TOTAL: Final = "lmcache_broker_pulls_total"
ASSIGNED_CHUNKS_TOTAL: Final = "lmcache_broker_assigned_chunks_total"
UNASSIGNED_CHUNKS_TOTAL: Final = "lmcache_broker_unassigned_chunks_total"
EXPIRED_LEASES_TOTAL: Final = "lmcache_broker_expired_leases_total"
WAITING_REQUESTS: Final = "lmcache_broker_waiting_requests"
QUEUED_REQUESTS_TOTAL: Final = "lmcache_broker_queued_requests_total"
TURNED_AWAY_REQUESTS_TOTAL: Final = "lmcache_broker_turned_away_requests_total"
ORDERED_COPIES_TOTAL: Final = "lmcache_broker_ordered_copies_total"
SEEN_PEERS: Final = "lmcache_broker_seen_peers"
RESYNCS_TOTAL: Final = "lmcache_broker_endpoint_lists_total"
WATCHES_TOTAL: Final = "lmcache_broker_endpoint_watches_total"
IS_SHARED: Final = "lmcache_broker_is_shared"
DELETION_COSTS_SET_TOTAL: Final = "lmcache_broker_deletion_costs_set_total"
DELETION_COST_FAILURES_TOTAL: Final = "lmcache_broker_deletion_cost_failures_total"
SHARING_FAILURES_TOTAL: Final = "lmcache_broker_sharing_failures_total"


class BrokerCollector(Collector):
    """Reads the figures when Prometheus asks.

    Args:
        registry: Peers.
        scheduler: Requests that wait.
        figures: What was decided.
        hot: Copies that were ordered.
        discovering: Peers that were seen; None: there is no discovery.
    """

    def __init__(
        self,
        registry: PeerRegistry,
        scheduler: TransferScheduler,
        figures: TransferFigures,
        hot: HotChunks,
        discovering: Discovering | None,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._figures = figures
        self._hot = hot
        self._discovering = discovering

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the broker."""
        registry, census = self._registry, self._registry.directory.census()
        scheduler, figures = self._scheduler, self._figures
        lost = registry.directory.num_expired
        for name, help_text, value in (
            (PEERS, "Peers with a live lease.", census.num_peers),
            (DRAINING_PEERS, "Live peers that get no new pulls.", census.num_draining),
            (PULLS_IN_FLIGHT, "Pulls and tickets that have not ended.", census.num_pulls),
            (WAITING_REQUESTS, "Requests that wait for a busy peer.", scheduler.num_waiting),
            (IS_SHARED, "Whether this broker knows what the others know.", registry.is_shared),
        ):
            yield GaugeMetricFamily(name, help_text, value)
        for name, help_text, value in (
            (EXPIRED_LEASES_TOTAL, "Leases that ran out without a goodbye.", lost),
            (PULLS_TOTAL, "Tickets signed.", figures.num_pulls),
            (ASSIGNED_CHUNKS_TOTAL, "Chunks assigned to a peer.", figures.num_assigned),
            (
                UNASSIGNED_CHUNKS_TOTAL,
                "Chunks that no live peer could serve.",
                figures.num_unassigned,
            ),
            (QUEUED_REQUESTS_TOTAL, "Requests that had to wait.", scheduler.num_queued),
            (
                TURNED_AWAY_REQUESTS_TOTAL,
                "Requests that a full queue refused.",
                scheduler.num_turned_away,
            ),
            (ORDERED_COPIES_TOTAL, "Copies of hot chunks asked for.", self._hot.num_ordered),
            (
                SHARING_FAILURES_TOTAL,
                "Calls to the shared memory that failed.",
                registry.num_failures,
            ),
        ):
            yield CounterMetricFamily(name, help_text, value)
        if self._discovering is not None:
            yield from self._discovery(self._discovering)

    def _discovery(self, discovering: Discovering) -> Iterator[Metric]:
        num_seen = len(discovering.discovery.seen)
        yield GaugeMetricFamily(SEEN_PEERS, "Peers in the list or the cluster.", num_seen)
        watch, costs = discovering.watch, discovering.costs
        if watch is not None:
            yield CounterMetricFamily(RESYNCS_TOTAL, "Lists of all endpoints.", watch.num_lists)
            yield CounterMetricFamily(WATCHES_TOTAL, "Watches begun.", watch.num_watches)
        if costs is not None:
            yield CounterMetricFamily(
                DELETION_COSTS_SET_TOTAL, "Pods whose deletion cost was set.", costs.num_patches
            )
            yield CounterMetricFamily(
                DELETION_COST_FAILURES_TOTAL, "Rounds of costs that failed.", costs.num_failures
            )
