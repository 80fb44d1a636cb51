"""What all pulls of one instance share."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from lmcache_core.p2p.broker_client import BrokerClient
from lmcache_core.p2p.figures import MAX_COUNTED_PEERS
from lmcache_core.p2p.hedging import HedgeBudget, PullTimes
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.telemetry.sparse_log import SparseLog

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PullFigures:
    """What pulls came to.

    Attributes:
        pulls: Peers that were asked.
        failed_pulls: Those that did not bring all that they were asked for.
        renewed_pulls: Tickets that ended before their pulls were over, and were replaced.
        hedged_pulls: Those that were late, so that another peer was asked too.
        won_hedges: Chunks that the other peer brought first.
        failed_over_chunks: Chunks that were asked for again because a peer failed.
        pulled_chunks: Chunks that came.
        pulled_bytes: Bytes of these.
        wasted_bytes: Of chunks that came a second time.
        corrupt_chunks: Chunks that came damaged, or were not what was asked for.
    """

    pulls: int = 0
    failed_pulls: int = 0
    renewed_pulls: int = 0
    hedged_pulls: int = 0
    won_hedges: int = 0
    failed_over_chunks: int = 0
    pulled_chunks: int = 0
    pulled_bytes: int = 0
    wasted_bytes: int = 0
    corrupt_chunks: int = 0


class PulledBytes:
    """Bytes that came, by the peer that sent them; of the peers that sent something last."""

    def __init__(self) -> None:
        self._by_peer: OrderedDict[str, int] = OrderedDict()

    def add(self, peer_id: str, num_bytes: int) -> None:
        """Count what a peer has sent."""
        self._by_peer[peer_id] = self._by_peer.pop(peer_id, 0) + num_bytes
        if len(self._by_peer) > MAX_COUNTED_PEERS:
            self._by_peer.popitem(last=False)

    def snapshot(self) -> dict[str, int]:
        """Bytes by the peer's id."""
        return dict(self._by_peer)


@dataclass(frozen=True, slots=True)
class PullParts:
    """What all pulls of one instance share.

    Attributes:
        instance: This instance.
        broker: Says who serves.
        peers: Connections.
        times: How long pulls took.
        budget: How many may be doubled.
        figures: What came of them.
        pulled: The same bytes by peer.
        log: Tells of peers that fail.
    """

    instance: str
    broker: BrokerClient
    peers: PeerPool
    times: PullTimes = field(default_factory=PullTimes)
    budget: HedgeBudget = field(default_factory=HedgeBudget)
    figures: PullFigures = field(default_factory=PullFigures)
    pulled: PulledBytes = field(default_factory=PulledBytes)
    log: SparseLog = field(default_factory=lambda: SparseLog(logger))
