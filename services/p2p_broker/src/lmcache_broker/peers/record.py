"""One live peer in the broker's memory, and the pulls that it serves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lmcache_core.p2p import DrainReport, Peer, PeerFigures, PeerStatus


@dataclass(slots=True)
class PeerRecord:
    """One live peer. Times are monotonic seconds.

    Attributes:
        peer: What it says of itself.
        owner: Tenant, or `SHARED_OWNER`.
        load: 0 (idle) to 1 (full).
        draining: It gets no new pulls.
        lease_ends_s: Until when it lives.
        drain: How far it is on its way to its end.
        figures: What it has done and holds, if it has said so.
    """

    peer: Peer
    owner: str
    load: float
    draining: bool
    lease_ends_s: float
    drain: DrainReport | None = None
    figures: PeerFigures | None = None
    _pulls: dict[str, float] = field(default_factory=dict)
    _shared_pulls: tuple[int, float] | None = None
    _num_anonymous: int = 0

    @property
    def field(self) -> str:
        """Its name among the peers of all owners. Neither part holds a slash."""
        return f"{self.owner}/{self.peer.id}"

    @property
    def life(self) -> str:
        """The same for one incarnation of it: a new one serves none of the old one's pulls."""
        return f"{self.field}#{self.peer.incarnation}"

    def num_pulls(self, now_s: float) -> int:
        """Pulls that have neither ended nor outlived their tickets, as all brokers know
        together, otherwise as this one does.
        """
        for pull_id, ends_s in list(self._pulls.items()):
            if ends_s > now_s:
                break
            del self._pulls[pull_id]
        if self._shared_pulls is not None:
            num_shared, until_s = self._shared_pulls
            if now_s < until_s:
                return num_shared
            self._shared_pulls = None
        return len(self._pulls)

    def add_pull(self, ends_s: float, pull_id: str | None = None) -> None:
        """Count a pull. Tickets live equally long, so that the oldest is the first to expire."""
        assert not self._pulls or next(reversed(self._pulls.values())) <= ends_s
        if pull_id is None:
            self._num_anonymous += 1
            pull_id = f"#{self._num_anonymous}"
        self._pulls[pull_id] = ends_s

    def end_pull(self, pull_id: str) -> None:
        """A pull is over before its ticket is; none of that id is fine."""
        if self._pulls.pop(pull_id, None) is not None and self._shared_pulls is not None:
            num_shared, until_s = self._shared_pulls
            self._shared_pulls = (max(0, num_shared - 1), until_s)

    def renew_pull(self, pull_id: str, ends_s: float) -> None:
        """A pull goes on, until no sooner than any other."""
        if self._pulls.pop(pull_id, None) is not None:
            self.add_pull(ends_s, pull_id)

    def share_pulls(self, num_pulls: int) -> None:
        """Set what all brokers together know of its pulls, until it is set again or doubted."""
        self._shared_pulls = (num_pulls, math.inf)

    def doubt_pulls(self, until_s: float) -> None:
        """The other brokers cannot be heard: what they said counts for no longer than that."""
        if self._shared_pulls is not None:
            self._shared_pulls = (self._shared_pulls[0], until_s)

    def status(self, now_s: float) -> PeerStatus:
        """What callers may see of it."""
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


def peer_id_of(life: str) -> str:
    """The id of the peer in a `PeerRecord.life`."""
    return life.partition("/")[2].rpartition("#")[0]
