"""The order in which holders are asked: near before far, idle before busy, and among equals always the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from lmcache_core.p2p import Peer

from lmcache_broker.peers.service import PeerRecord


def rank(candidates: Iterable[PeerRecord], requester_id: str, requester: Peer | None, max_pulls: int, now_s: float) -> list[PeerRecord]:
    """Sort candidates, best first.

    One order serves a whole request, so that its chunks gather at few peers: few pulls, each worth its connection.

    Args:
        candidates: Peers that may serve.
        requester_id: Spreads equal peers over requesters, always the same way for each.
        requester: Where the requester runs, if it is registered.
        max_pulls: What a peer serves at once; the pressure on it is pulls over this, plus its load.
        now_s: Monotonic seconds.
    """

    def order(record: PeerRecord) -> tuple[int, float, bytes]:
        pressure = record.num_pulls(now_s) / max_pulls + record.load
        return (_distance(requester, record.peer), pressure, _tie(requester_id, record.peer.id))

    return sorted(candidates, key=order)


def _distance(requester: Peer | None, peer: Peer) -> int:
    """0 on the same node, 1 in the same zone, 2 elsewhere or unknown."""
    if requester is None:
        return 2
    if requester.node and requester.node == peer.node:
        return 0
    return 1 if requester.zone and requester.zone == peer.zone else 2


def _tie(requester_id: str, peer_id: str) -> bytes:
    """Ids hold no NUL, so that two pairs never spell the same text."""
    return hashlib.sha256(f"{requester_id}\0{peer_id}".encode()).digest()
