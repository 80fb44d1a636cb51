"""One live peer in the broker's memory with its pulls, and its form shared between brokers."""

from __future__ import annotations

import math
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
    """

    peer: Peer
    owner: str
    load: float
    draining: bool
    lease_ends_s: float
    drain: DrainReport | None = None
    figures: PeerFigures | None = None
    pulls: dict[str, float] = field(default_factory=dict)
    _shared_pulls: tuple[int, float] | None = None

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
        if self._shared_pulls is not None:
            num_shared, until_s = self._shared_pulls
            if now_s < until_s:
                return num_shared
            self._shared_pulls = None
        return sum(ends_s > now_s for ends_s in self.pulls.values())

    def end_pull(self, pull_id: str) -> None:
        """End a pull before its ticket expires, if it exists."""
        if self.pulls.pop(pull_id, None) is not None and self._shared_pulls is not None:
            num_shared, until_s = self._shared_pulls
            self._shared_pulls = (max(0, num_shared - 1), until_s)

    def share_pulls(self, num_pulls: int) -> None:
        """Set the total of its pulls at all brokers, valid until it is set again or doubted."""
        self._shared_pulls = (num_pulls, math.inf)

    def doubt_pulls(self, until_s: float) -> None:
        """Stop counting other brokers' pulls at that time, unless they are reported again."""
        if self._shared_pulls is not None:
            self._shared_pulls = (self._shared_pulls[0], until_s)

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
        ttl_ms: Remaining lifetime of its lease; 0 if it has expired.
        num_pulls: Unfinished pulls that all brokers together have granted.
        is_gone: It ended its lease.
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


class PlacedOrder(NamedTuple):
    """An order to copy a chunk, and the peer of a tenant that should carry it out."""

    tenant: str
    server: str
    order: CopyOrder


def peer_id_of(life: str) -> str:
    """Return the id of the peer in a `PeerRecord.life`."""
    return life.partition("/")[2].rpartition("#")[0]
