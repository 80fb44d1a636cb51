"""One live peer in the broker's memory, and the pulls that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_core.p2p import DrainReport, Peer, PeerStatus


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
    """

    peer: Peer
    owner: str
    load: float
    draining: bool
    lease_ends_s: float
    drain: DrainReport | None = None
    _pulls: dict[str, float] = field(default_factory=dict)
    _shared_pulls: tuple[int, float] = (0, 0.0)
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
        """Pulls that have neither ended nor outlived their tickets, as far as this broker or all of them know."""
        for pull_id, ends_s in list(self._pulls.items()):
            if ends_s > now_s:
                break
            del self._pulls[pull_id]
        num_shared, until_s = self._shared_pulls
        return max(len(self._pulls), num_shared if now_s < until_s else 0)

    def add_pull(self, ends_s: float, pull_id: str | None = None) -> None:
        """Count a pull. Tickets live equally long, so that the oldest is the first to expire."""
        assert not self._pulls or next(reversed(self._pulls.values())) <= ends_s
        if pull_id is None:
            self._num_anonymous += 1
            pull_id = f"#{self._num_anonymous}"
        self._pulls[pull_id] = ends_s

    def end_pull(self, pull_id: str) -> None:
        """A pull is over before its ticket is; none of that id is fine."""
        if self._pulls.pop(pull_id, None) is not None:
            num_shared, until_s = self._shared_pulls
            self._shared_pulls = (max(0, num_shared - 1), until_s)

    def share_pulls(self, num_pulls: int, until_s: float) -> None:
        """What all brokers together know of its pulls, believed until then unless said anew."""
        self._shared_pulls = (num_pulls, until_s)

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
