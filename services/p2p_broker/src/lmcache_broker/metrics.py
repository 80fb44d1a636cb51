"""The broker's figures, for Prometheus. Names are constants here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_broker.peers.service import PeerDirectory
from lmcache_broker.transfers.service import TransferService

PEERS: Final = "lmcache_broker_peers"
DRAINING_PEERS: Final = "lmcache_broker_draining_peers"
PULLS_IN_FLIGHT: Final = "lmcache_broker_pulls_in_flight"
PULLS_TOTAL: Final = "lmcache_broker_pulls_total"
ASSIGNED_CHUNKS_TOTAL: Final = "lmcache_broker_assigned_chunks_total"
UNASSIGNED_CHUNKS_TOTAL: Final = "lmcache_broker_unassigned_chunks_total"
EXPIRED_LEASES_TOTAL: Final = "lmcache_broker_expired_leases_total"


class BrokerCollector(Collector):
    """Reads the figures when Prometheus asks."""

    def __init__(self, directory: PeerDirectory, transfers: TransferService) -> None:
        self._directory = directory
        self._transfers = transfers

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the broker."""
        census = self._directory.census()
        figures = self._transfers.figures
        yield GaugeMetricFamily(PEERS, "Peers with a live lease.", census.num_peers)
        yield GaugeMetricFamily(DRAINING_PEERS, "Live peers that get no new pulls.", census.num_draining)
        yield GaugeMetricFamily(PULLS_IN_FLIGHT, "Tickets that have not expired.", census.num_pulls)
        yield CounterMetricFamily(EXPIRED_LEASES_TOTAL, "Leases that ran out without a goodbye.", self._directory.num_expired)
        yield CounterMetricFamily(PULLS_TOTAL, "Tickets signed.", figures.num_pulls)
        yield CounterMetricFamily(ASSIGNED_CHUNKS_TOTAL, "Chunks that were assigned to a peer.", figures.num_assigned)
        yield CounterMetricFamily(UNASSIGNED_CHUNKS_TOTAL, "Chunks that no live peer could serve.", figures.num_unassigned)
