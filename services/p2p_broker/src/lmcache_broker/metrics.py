"""The broker's metrics for Prometheus. Their names are defined only here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily as Counter
from prometheus_client.metrics_core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from lmcache_broker.discovery.discovery import Discovery
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.transfers.hot import HotChunks
from lmcache_broker.transfers.scheduler import TransferScheduler

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
    """Reads the figures on each scrape."""

    def __init__(
        self,
        registry: PeerRegistry,
        scheduler: TransferScheduler,
        hot: HotChunks,
        discovery: Discovery | None,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._hot = hot
        self._discovery = discovery

    @override
    def collect(self) -> Iterator[Metric]:
        registry, scheduler = self._registry, self._scheduler
        peers = registry.directory.visible()
        num_draining = sum(peer.draining for peer in peers)
        num_pulls = sum(peer.num_pulls for peer in peers)
        num_waiting = len(scheduler.waiting)
        num_lost = registry.directory.num_expired
        yield Gauge(PEERS, "Peers with a live lease.", len(peers))
        yield Gauge(DRAINING_PEERS, "Live peers that get no new pulls.", num_draining)
        yield Gauge(PULLS_IN_FLIGHT, "Pulls and tickets that have not ended.", num_pulls)
        yield Gauge(WAITING_REQUESTS, "Requests waiting for a busy peer.", num_waiting)
        yield Gauge(
            IS_SHARED, "Whether this broker shares its state with the others.", registry.is_shared
        )
        yield Counter(EXPIRED_LEASES_TOTAL, "Leases that expired without being ended.", num_lost)
        yield Counter(PULLS_TOTAL, "Tickets signed.", scheduler.num_pulls)
        yield Counter(ASSIGNED_CHUNKS_TOTAL, "Chunks assigned to a peer.", scheduler.num_assigned)
        yield Counter(
            UNASSIGNED_CHUNKS_TOTAL,
            "Chunks that no live peer could serve.",
            scheduler.num_unassigned,
        )
        yield Counter(QUEUED_REQUESTS_TOTAL, "Requests that had to wait.", scheduler.num_queued)
        yield Counter(
            TURNED_AWAY_REQUESTS_TOTAL,
            "Requests that a full queue refused.",
            scheduler.num_turned_away,
        )
        yield Counter(ORDERED_COPIES_TOTAL, "Copies of hot chunks ordered.", self._hot.num_ordered)
        yield Counter(
            SHARING_FAILURES_TOTAL,
            "Failed calls to the shared peer store.",
            registry.num_failures,
        )
        if self._discovery is not None:
            yield from self._collect_discovery(self._discovery)

    def _collect_discovery(self, discovery: Discovery) -> Iterator[Metric]:
        watch, costs = discovery.watch, discovery.costs
        yield Gauge(SEEN_PEERS, "Peers in the list or the cluster.", len(discovery.seen))
        if watch is not None:
            yield Counter(RESYNCS_TOTAL, "Lists of all endpoints.", watch.num_lists)
            yield Counter(WATCHES_TOTAL, "Watches begun.", watch.num_watches)
        if costs is not None:
            num_set, num_failures = costs.num_patches, costs.num_failures
            yield Counter(DELETION_COSTS_SET_TOTAL, "Pods whose deletion cost was set.", num_set)
            yield Counter(
                DELETION_COST_FAILURES_TOTAL,
                "Failed rounds of setting deletion costs.",
                num_failures,
            )
