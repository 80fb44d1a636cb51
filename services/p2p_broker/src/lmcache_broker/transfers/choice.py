"""Chooses the holder that serves a chunk: near before far, idle before busy, memory before disk,
with a stable order among equals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from lmcache_core.names import MEMORY_TIER
from lmcache_core.p2p import Peer
from lmcache_core.p2p.messages import ChunkHolders

from lmcache_broker.peers.record import PeerRecord

SLOW_TIER_PRESSURE: Final = 0.5
"""A holder that must read the chunk from disk counts as this much busier. It still wins over one
farther away.
"""

Order = tuple[int, float, bytes]


@dataclass(frozen=True, slots=True)
class Choice:
    """Every chunk of a request, each in exactly one of these attributes.

    Attributes:
        by_peer: Chunks by the peer that is to serve them, best peers first.
        busy: Chunks whose live holders all serve their maximum of pulls.
        unheld: Chunks that no live holder can serve.
    """

    by_peer: Mapping[str, Sequence[str]]
    busy: Sequence[str]
    unheld: Sequence[str]


def choose(
    find: Callable[[str], PeerRecord | None],
    max_pulls: int,
    requester: str,
    wanted: Mapping[str, ChunkHolders],
    now_s: float,
    held_back: Collection[str] = (),
) -> Choice:
    """Choose a peer for each chunk.

    One order of peers applies to the whole request, except for the tier, so that its chunks gather
    at few peers: few pulls, each worth its connection. A request is one pull per peer, so one free
    slot is enough.

    Args:
        find: Returns the live peer with an id that is visible to the requester.
        max_pulls: Pulls that a peer serves at a time; its pressure is pulls over this, plus its
            load.
        requester: The instance that will pull; never chosen itself.
        wanted: Possible holders of each chunk, by chunk id. Unknown holders are ignored.
        now_s: Seconds, monotonic.
        held_back: `PeerRecord.field` of peers to count as busy.
    """
    named = {holder for chunk in wanted.values() for holder in chunk.holders} - {requester}
    alive = {
        peer_id: record
        for peer_id in named
        if (record := find(peer_id)) is not None and not record.draining
    }
    asking = find(requester)
    place = None if asking is None else asking.peer
    order: dict[str, Order] = {}
    for peer_id, record in alive.items():
        num_pulls = record.num_pulls(now_s)
        if num_pulls < max_pulls and record.field not in held_back:
            pressure = num_pulls / max_pulls + record.load
            order[peer_id] = (_distance(place, record.peer), pressure, _tie(requester, peer_id))

    def rank(chunk: ChunkHolders, holder: str) -> Order:
        distance, pressure, tie = order[holder]
        tier = chunk.tiers[chunk.holders.index(holder)] if chunk.tiers else MEMORY_TIER
        if tier != MEMORY_TIER:
            pressure += SLOW_TIER_PRESSURE
        return (distance, pressure, tie)

    by_peer: dict[str, list[str]] = {}
    busy: list[str] = []
    unheld: list[str] = []
    for chunk_id, chunk in wanted.items():
        able = [holder for holder in chunk.holders if holder in order]
        if able:
            by_peer.setdefault(min(able, key=partial(rank, chunk)), []).append(chunk_id)
        else:
            (busy if any(holder in alive for holder in chunk.holders) else unheld).append(chunk_id)
    return Choice(by_peer, busy, unheld)


def _distance(requester: Peer | None, peer: Peer) -> int:
    """Return 0 on the same node, 1 in the same zone, 2 elsewhere or unknown."""
    if requester is None:
        return 2
    if requester.node and requester.node == peer.node:
        return 0
    return 1 if requester.zone and requester.zone == peer.zone else 2


def _tie(requester_id: str, peer_id: str) -> bytes:
    """Return a key that spreads equal peers over requesters, stable for each pair. Ids contain no
    NUL, so that no two pairs have the same text.
    """
    return hashlib.sha256(f"{requester_id}\0{peer_id}".encode()).digest()
