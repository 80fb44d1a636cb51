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


class DiscoveryCollector(Collector):
    """Figures of discovery; nothing where there is none."""

    def __init__(self, discovering: Discovering | None) -> None:
        self._discovering = discovering

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of discovery."""
        if self._discovering is None:
            return
        yield GaugeMetricFamily(
            SEEN_PEERS,
            "Peers that a list or the cluster tells of.",
            self._discovering.discovery.num_seen,
        )
        if self._discovering.watch is not None:
            yield CounterMetricFamily(
                RESYNCS_TOTAL,
                "Lists of all endpoints: the first, and resyncs.",
                self._discovering.watch.num_lists,
            )
            yield CounterMetricFamily(
                WATCHES_TOTAL,
                "Watches of endpoints that were begun.",
                self._discovering.watch.num_watches,
            )
        costs = self._discovering.costs
        if costs is not None:
            yield CounterMetricFamily(
                DELETION_COSTS_SET_TOTAL, "Pods whose deletion cost was set.", costs.num_patches
            )
            yield CounterMetricFamily(
                DELETION_COST_FAILURES_TOTAL,
                "Rounds of setting deletion costs that failed.",
                costs.num_failures,
            )


class BrokerCollector(Collector):
    """Reads the figures when Prometheus asks."""

    def __init__(
        self,
        registry: PeerRegistry,
        scheduler: TransferScheduler,
        figures: TransferFigures,
        hot: HotChunks,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._figures = figures
        self._hot = hot

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the broker."""
        census = self._registry.directory.census()
        figures = self._figures
        yield GaugeMetricFamily(PEERS, "Peers with a live lease.", census.num_peers)
        yield GaugeMetricFamily(
            DRAINING_PEERS, "Live peers that get no new pulls.", census.num_draining
        )
        yield GaugeMetricFamily(
            PULLS_IN_FLIGHT,
            "Pulls that have neither ended nor outlived their tickets.",
            census.num_pulls,
        )
        yield CounterMetricFamily(
            EXPIRED_LEASES_TOTAL,
            "Leases that ran out without a goodbye.",
            self._registry.directory.num_expired,
        )
        yield CounterMetricFamily(PULLS_TOTAL, "Tickets signed.", figures.num_pulls)
        yield CounterMetricFamily(
            ASSIGNED_CHUNKS_TOTAL, "Chunks that were assigned to a peer.", figures.num_assigned
        )
        yield CounterMetricFamily(
            UNASSIGNED_CHUNKS_TOTAL, "Chunks that no live peer could serve.", figures.num_unassigned
        )
        yield GaugeMetricFamily(
            WAITING_REQUESTS, "Requests that wait for a busy peer.", self._scheduler.num_waiting
        )
        yield CounterMetricFamily(
            QUEUED_REQUESTS_TOTAL,
            "Requests that had to wait for a busy peer.",
            self._scheduler.num_queued,
        )
        yield CounterMetricFamily(
            TURNED_AWAY_REQUESTS_TOTAL,
            "Requests for which the queue had no room.",
            self._scheduler.num_turned_away,
        )
        yield CounterMetricFamily(
            ORDERED_COPIES_TOTAL,
            "Copies of hot chunks that holders were asked to make.",
            self._hot.num_ordered,
        )
        yield GaugeMetricFamily(
            IS_SHARED,
            "Whether this broker knows now what the others know.",
            self._registry.is_shared,
        )
        yield CounterMetricFamily(
            SHARING_FAILURES_TOTAL,
            "Calls to the shared memory that failed.",
            self._registry.num_failures,
        )
