"""One live peer in the broker's memory with its pulls, and its form shared between brokers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache_core.p2p import CopyOrder, DrainReport, Peer, PeerFigures, PeerStatus


@dataclass(slots=True)
class PeerRecord:
    """One live peer. Times are monotonic seconds.

    Attributes:
        owner: Tenant, or `SHARED_OWNER`.
        load: 0 (idle) to 1 (full).
        draining: It gets no new pulls.
        drain: Progress of its drain, if it reports one.
        figures: Its counters, if it reports any.
        pulls: Pulls that this broker has granted: id -> expiry of the ticket. `PullBook` maintains
            them.
        shared_pulls: Unfinished pulls that all brokers together have granted; None: unknown.
        heard_s: When this broker last received its heartbeat.
    """

    peer: Peer
    owner: str
    load: float
    draining: bool
    lease_ends_s: float
    drain: DrainReport | None = None
    figures: PeerFigures | None = None
    pulls: dict[str, float] = field(default_factory=dict)
    shared_pulls: int | None = None
    heard_s: float = float("-inf")

    @property
    def field(self) -> str:
        """Return its name among the peers of all owners. Neither part contains a slash."""
        return f"{self.owner}/{self.peer.id}"

    @property
    def life(self) -> str:
        """Return the same for one incarnation: a new one serves none of the previous one's
        pulls.
        """
        return f"{self.field}#{self.peer.incarnation}"

    def num_pulls(self, now_s: float) -> int:
        """Return the pulls that have neither ended nor outlived their tickets: those of all brokers
        if known, otherwise this one's.
        """
        if self.shared_pulls is not None:
            return self.shared_pulls
        return sum(ends_s > now_s for ends_s in self.pulls.values())

    def status(self, now_s: float) -> PeerStatus:
        """Return the public status of this peer."""
        return PeerStatus(
            id=self.peer.id,
            incarnation=self.peer.incarnation,
            distributed_url=self.peer.distributed_url,
            kind=self.peer.kind,
            zone=self.peer.zone,
            node=self.peer.node,
            load=self.load,
            draining=self.draining,
            num_pulls=self.num_pulls(now_s),
            expires_in_ms=max(0, round((self.lease_ends_s - now_s) * 1000)),
            drain=self.drain,
        )


@dataclass(frozen=True, slots=True)
class SharedPeer:
    """A peer as shared between brokers.

    Attributes:
        ttl_ms: Remaining lifetime of its lease.
        num_pulls: Unfinished pulls that all brokers together have granted.
    """

    owner: str
    peer: Peer
    load: float
    draining: bool
    ttl_ms: int
    num_pulls: int = 0
    drain: DrainReport | None = None
    figures: PeerFigures | None = None


class PlacedOrder(NamedTuple):
    """An order to copy a chunk, and the peer of a tenant that should carry it out."""

    tenant: str
    server: str
    order: CopyOrder


def peer_id_of(life: str) -> str:
    """Return the id of the peer in a `PeerRecord.life`."""
    return life.partition("/")[2].rpartition("#")[0]
