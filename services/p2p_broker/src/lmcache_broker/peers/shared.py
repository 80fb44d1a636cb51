"""What several brokers know together: the interface, and the values that pass through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_core.p2p import CopyOrder, DrainReport, Peer, PeerFigures


@dataclass(frozen=True, slots=True)
class SharedPeer:
    """A peer as brokers tell each other.

    Attributes:
        owner: Tenant, or `SHARED_OWNER`.
        peer: What it says of itself.
        load: 0 (idle) to 1 (full).
        draining: It gets no new pulls.
        ttl_ms: What is left of its lease; 0 when it has run out.
        num_pulls: Pulls that all brokers together have granted and that are not over.
        is_gone: It ended its lease.
        drain: How far it is on its way to its end.
        figures: What it has done and holds, if it has said so.
    """

    owner: str
    peer: Peer
    load: float
    draining: bool
    ttl_ms: int
    num_pulls: int = 0
    is_gone: bool = False
    drain: DrainReport | None = None
    figures: PeerFigures | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since the last question.

    Attributes:
        peers: New state of peers.
        is_anew: The others' memory was lost meanwhile: what is not told here is not known to them.
    """

    peers: Sequence[SharedPeer]
    is_anew: bool


@dataclass(frozen=True, slots=True)
class PullClaim:
    """A pull that a broker would like to grant: `life` of the peer, and the id of the pull."""

    life: str
    pull_id: str


@dataclass(frozen=True, slots=True)
class PullVerdict:
    """Whether the peer has room for the pull, and how many it serves now."""

    is_granted: bool
    num_pulls: int


@dataclass(frozen=True, slots=True)
class PullUnderway:
    """A pull that a broker has granted, as it tells the others when their memory was lost.

    Attributes:
        who: The requester.
        claim: At whom, and its id.
        age_ms: Since it began.
        ttl_ms: Until its ticket ends.
    """

    who: str
    claim: PullClaim
    age_ms: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class PlacedOrder:
    """A copy that a peer is to make.

    Attributes:
        tenant: Whose chunk it is.
        server: The peer.
        order: Of what, and to whom.
    """

    tenant: str
    server: str
    order: CopyOrder


class SharedPeers(Protocol):
    """Memory that brokers share. Every call raises `UnavailableError` when it cannot be reached
    in time.
    """

    async def announce(self, peers: Sequence[SharedPeer]) -> list[bool | None]:
        """Register or renew; for each whether it drains, or None where a newer incarnation is
        live.
        """

    async def remove(self, owner: str, peer_id: str) -> None:
        """End a lease."""

    async def drain(self, owner: str, peer_id: str) -> None:
        """No new pulls for this incarnation of it."""

    async def changes(self) -> Changes:
        """What has changed since the last call that succeeded; everything at the first."""

    async def claim(
        self, who: str, claims: Sequence[PullClaim], max_pulls: int, ttl_ms: int
    ) -> list[PullVerdict]:
        """Count a requester's pulls against their peers, each only if that keeps within
        `max_pulls`, until ended or `ttl_ms` are over.
        """

    async def restore_pulls(self, pulls: Sequence[PullUnderway]) -> None:
        """Count pulls that were granted already; those that are known are passed over."""

    async def renew_pulls(self, who: str, pull_ids: Sequence[str], ttl_ms: int) -> list[str | None]:
        """A requester's pulls go on for so long; for each the life of the peer, or None where
        there is no such pull.
        """

    async def end_pulls(self, who: str, pull_ids: Sequence[str]) -> list[bool]:
        """A requester's pulls are over; for each whether there was one."""

    async def order_copies(self, orders: Sequence[PlacedOrder], ttl_ms: int) -> None:
        """Peers are to make copies; who does not ask for that long is not told."""

    async def take_orders(self, tenant: str, peer_id: str) -> list[CopyOrder]:
        """What that peer is to copy for that tenant; it is told once."""

    async def ping(self) -> None:
        """Whether it answers."""

    async def close(self) -> None:
        """End connections. Idempotent."""
