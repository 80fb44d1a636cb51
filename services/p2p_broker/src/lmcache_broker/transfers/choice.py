"""Which holder serves a chunk: near before far, idle before busy, memory before disk, and among
equals always the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_core.p2p import Peer
from lmcache_core.security import Principal

from lmcache_broker.peers.directory import PeerDirectory
from lmcache_broker.peers.record import PeerRecord

MEMORY_TIER: Final = "Hot"
SLOW_TIER_PRESSURE: Final = 0.5
"""A holder that has to read the chunk from its disk counts as that much busier. It still wins
from one that is farther away.
"""

Order = tuple[int, float, bytes]


@dataclass(frozen=True, slots=True)
class WantedFrom:
    """Who may hold one chunk.

    Attributes:
        holders: Their ids.
        tiers: Where it lies at each of them, as far as the requester knows: as many, or none.
    """

    holders: Sequence[str]
    tiers: Sequence[str] = ()

    def pressure_at(self, holder: str) -> float:
        """How much busier the tier makes a holder."""
        if not self.tiers:
            return 0.0
        return 0.0 if self.tiers[self.holders.index(holder)] == MEMORY_TIER else SLOW_TIER_PRESSURE


@dataclass(frozen=True, slots=True)
class Choice:
    """Every chunk of a request, in exactly one place.

    Attributes:
        by_peer: Chunks by the peer that is to serve them, best peers first.
        busy: Chunks whose live holders all serve as many pulls as they may.
        unheld: Chunks that no live holder can serve.
    """

    by_peer: Mapping[str, Sequence[str]]
    busy: Sequence[str]
    unheld: Sequence[str]


class Chooser:
    """Chooses among live peers.

    Args:
        directory: Who is alive.
        max_pulls: What a peer serves at once; the pressure on it is pulls over this, plus its load.
    """

    def __init__(self, directory: PeerDirectory, max_pulls: int) -> None:
        self._directory = directory
        self._max_pulls = max_pulls

    def choose(
        self,
        principal: Principal,
        requester: str,
        wanted: Mapping[str, WantedFrom],
        now_s: float,
        held_back: Collection[str] = (),
    ) -> Choice:
        """Choose a peer for each chunk.

        One order serves a whole request, but for the tier, so that its chunks gather at few peers:
        few pulls, each worth its connection. A request is one pull per peer, so that a peer with
        one free place is able.

        Args:
            principal: It is served by peers that it sees.
            requester: The instance that will pull; never chosen itself.
            wanted: Who may hold each chunk. Unknown ids are passed over.
            now_s: Monotonic seconds.
            held_back: `PeerRecord.field` of peers to count as busy.
        """
        named = {holder for chunk in wanted.values() for holder in chunk.holders} - {requester}
        found = {peer_id: self._directory.find(principal, peer_id) for peer_id in named}
        alive = {
            peer_id: record
            for peer_id, record in found.items()
            if record is not None and not record.draining
        }
        asking = self._directory.find(principal, requester)
        place = None if asking is None else asking.peer
        order = {
            peer_id: self._order(record, requester, place, now_s)
            for peer_id, record in alive.items()
            if record.num_pulls(now_s) < self._max_pulls and record.field not in held_back
        }
        by_peer: dict[str, list[str]] = {}
        busy: list[str] = []
        unheld: list[str] = []
        for chunk_id, chunk in wanted.items():
            able = [holder for holder in chunk.holders if holder in order]
            if able:
                by_peer.setdefault(
                    min(
                        able,
                        key=lambda holder: _with_tier(order[holder], chunk.pressure_at(holder)),
                    ),
                    [],
                ).append(chunk_id)
            else:
                (busy if any(holder in alive for holder in chunk.holders) else unheld).append(
                    chunk_id
                )
        return Choice(by_peer, busy, unheld)

    def _order(self, record: PeerRecord, requester: str, place: Peer | None, now_s: float) -> Order:
        pressure = record.num_pulls(now_s) / self._max_pulls + record.load
        return (_distance(place, record.peer), pressure, _tie(requester, record.peer.id))


def _with_tier(order: Order, pressure: float) -> Order:
    return (order[0], order[1] + pressure, order[2])


def _distance(requester: Peer | None, peer: Peer) -> int:
    """0 on the same node, 1 in the same zone, 2 elsewhere or unknown."""
    if requester is None:
        return 2
    if requester.node and requester.node == peer.node:
        return 0
    return 1 if requester.zone and requester.zone == peer.zone else 2


def _tie(requester_id: str, peer_id: str) -> bytes:
    """Spreads equal peers over requesters, always the same way for each. Ids hold no NUL, so
    that two pairs never spell the same text.
    """
    return hashlib.sha256(f"{requester_id}\0{peer_id}".encode()).digest()
