"""The directory of live peers: leases, ownership, pulls in flight. All of it is soft state that one
heartbeat restores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lmcache_core.errors import CapacityError
from lmcache_core.p2p import (
    DrainReport,
    Lease,
    Peer,
    PeerFigures,
    PeerStatus,
    parse_distributed_url,
)
from lmcache_core.security import SHARED_OWNER, Principal, owner_of
from lmcache_servicekit.auth import STORAGE_KIND, require_role_for
from lmcache_servicekit.errors import ConflictError, NotFoundError

from lmcache_broker.peers.record import PeerRecord, SharedPeer


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Bounds on the directory.

    Attributes:
        max_peers: Live peers of all owners together.
        max_peers_per_owner: Live peers of one tenant, so that it cannot crowd out the others.
    """

    max_peers: int
    max_peers_per_owner: int
    max_lease_ttl_ms: int


class PeerDirectory:
    """Live peers by owner and id.

    A client's peers belong to its tenant; storage servers and an admin's peers serve every tenant.
    A principal sees its tenant's peers and the shared ones; if an id exists in both, a storage
    server wins, and otherwise the tenant's own. So no tenant can see, replace or squat on another
    one's peers, and no client can stand in for a storage server by taking its name.

    Storage servers show each other their tokens and hand each other all tenants' chunks. A client
    must therefore not register as one: `require_role_for`.

    Attributes:
        num_expired: Leases that expired without being ended, as far as noticed.
    """

    def __init__(self, limits: PeerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._records: dict[tuple[str, str], PeerRecord] = {}
        self.num_expired = 0

    def announce(
        self,
        principal: Principal,
        peer: Peer,
        *,
        load: float,
        ttl_ms: int,
        draining: bool,
        drain: DrainReport | None = None,
        figures: PeerFigures | None = None,
    ) -> Lease:
        """Register a peer or renew its lease. A drain lasts for the incarnation.

        Raises:
            PermissionDeniedError: The caller's role may not register peers of that kind.
            ConflictError: A newer incarnation is live: the caller is a left-over process.
            CapacityError: The peer is new and the directory, or its owner's share, is full.
        """
        require_role_for(principal, peer.kind)
        now_s = self._clock()
        key = (owner_of(principal), peer.id)
        ttl_ms = min(ttl_ms, self._limits.max_lease_ttl_ms)
        lease_ends_s = now_s + ttl_ms / 1000
        known = self._live(key, now_s)
        if known is None:
            self._make_room(key[0], now_s)
        elif peer.incarnation < known.peer.incarnation:
            raise ConflictError(
                f"peer {peer.id}: incarnation {known.peer.incarnation} is registered"
            )
        if known is None or peer.incarnation > known.peer.incarnation:
            record = self._records[key] = PeerRecord(peer, key[0], load, draining, lease_ends_s)
            self._forget_sightings_of(record)
        else:
            record = known
            record.peer, record.load, record.lease_ends_s = peer, load, lease_ends_s
            record.draining = record.draining or draining
        record.drain, record.figures, record.heard_s = drain, figures, now_s
        sighted = self._records.get((SHARED_OWNER, peer.id))
        if sighted is not None and sighted is not record and _is_sighting_of(sighted, peer):
            self.forget(sighted)
        return Lease(ttl_ms, record.draining)

    def find(self, principal: Principal, peer_id: str) -> PeerRecord | None:
        """Return the live peer with that id that is visible to `principal`; None if there is
        none.
        """
        now_s = self._clock()
        own = self._live((principal.tenant, peer_id), now_s)
        shared = self._live((SHARED_OWNER, peer_id), now_s)
        if own is None or (shared is not None and shared.peer.kind == STORAGE_KIND):
            return shared
        return own

    def get(self, principal: Principal, peer_id: str) -> PeerStatus:
        """Return the public status of a peer.

        Raises:
            NotFoundError: There is none.
        """
        return self.require(principal, peer_id).status(self._clock())

    def visible(self, principal: Principal | None = None) -> list[PeerStatus]:
        """Return all live peers visible to `principal` (None: all), by id."""
        now_s = self._clock()
        return sorted(
            (record.status(now_s) for record in self.records(principal)), key=lambda peer: peer.id
        )

    def records(self, principal: Principal | None = None) -> list[PeerRecord]:
        """Return the records of these peers, for reading."""
        self._forget_expired(self._clock())
        return [
            record
            for record in self._records.values()
            if principal is None or record.owner in (principal.tenant, SHARED_OWNER)
        ]

    def remove(self, principal: Principal, peer_id: str) -> None:
        """End a lease that `principal` could have taken, if there is one."""
        self._records.pop((owner_of(principal), peer_id), None)

    def drain(self, principal: Principal, peer_id: str) -> PeerStatus:
        """Stop new pulls from a peer.

        Raises:
            NotFoundError: There is no peer with that id.
        """
        record = self.require(principal, peer_id)
        record.draining = True
        return record.status(self._clock())

    def sight(self, owner: str, peer: Peer, ttl_s: float) -> None:
        """Record that a peer was seen from outside; a registration takes precedence.

        Args:
            owner: Its owner until it registers.
            peer: The peer, with incarnation 0, which any registration exceeds.

        Raises:
            CapacityError: The peer is new and the directory, or its owner's share, is full.
        """
        now_s = self._clock()
        found = self.at(peer)
        if any(record.peer.incarnation > 0 and record.peer.kind == peer.kind for record in found):
            sighted = self._records.get((owner, peer.id))
            if sighted is not None and sighted.peer.incarnation == 0:
                self.forget(sighted)
            return
        key = (owner, peer.id)
        known = self._live(key, now_s)
        if known is None:
            self._make_room(owner, now_s)
            self._records[key] = PeerRecord(peer, owner, 0.0, False, now_s + ttl_s)
        elif known.peer.incarnation == 0:
            known.peer, known.lease_ends_s = peer, now_s + ttl_s

    def at(self, peer: Peer) -> list[PeerRecord]:
        """Return live peers with the same id and host, of any owner: two tenants may have peers
        with the same name.
        """
        now_s, host = self._clock(), parse_distributed_url(peer.distributed_url).host
        return [
            record
            for key, record in self._records.items()
            if key[1] == peer.id
            and self._live(key, now_s)
            and parse_distributed_url(record.peer.distributed_url).host == host
        ]

    def forget(self, record: PeerRecord) -> None:
        """Forget a peer that is gone, regardless of its lease."""
        self._records.pop((record.owner, record.peer.id), None)

    def replace(self, peers: Iterable[SharedPeer], read_s: float) -> None:
        """Replace what is known by what the brokers share.

        Sightings stay: they are each broker's own. So does what was heard after the read began,
        and a drain, which lasts for the incarnation.

        Args:
            peers: All of them; the bounds were checked by the brokers that received them.
            read_s: When the read began.
        """
        now_s = self._clock()
        self._forget_expired(now_s)
        known = self._records
        self._records = {
            key: record
            for key, record in known.items()
            if record.peer.incarnation == 0 or record.heard_s >= read_s
        }
        for shared in peers:
            key = (shared.owner, shared.peer.id)
            record = known.get(key)
            if record is not None and record.heard_s >= read_s:
                continue
            lease_ends_s = now_s + shared.ttl_ms / 1000
            if record is None or record.peer.incarnation != shared.peer.incarnation:
                record = PeerRecord(
                    shared.peer, shared.owner, shared.load, shared.draining, lease_ends_s
                )
            record.peer, record.load, record.lease_ends_s = shared.peer, shared.load, lease_ends_s
            record.draining = record.draining or shared.draining
            record.drain, record.figures = shared.drain, shared.figures
            record.shared_pulls = shared.num_pulls
            self._records[key] = record

    def forget_shared_pulls(self) -> None:
        """Count this broker's own pulls only, until others are read again."""
        for record in self._records.values():
            record.shared_pulls = None

    def require(self, principal: Principal, peer_id: str) -> PeerRecord:
        """Return the live peer with that id that is visible to `principal`.

        Raises:
            NotFoundError: There is none.
        """
        record = self.find(principal, peer_id)
        if record is None:
            raise NotFoundError(f"no live peer {peer_id}")
        return record

    def _live(self, key: tuple[str, str], now_s: float) -> PeerRecord | None:
        record = self._records.get(key)
        return record if record is not None and now_s < record.lease_ends_s else None

    def _forget_expired(self, now_s: float) -> None:
        live = {key: record for key, record in self._records.items() if now_s < record.lease_ends_s}
        self.num_expired += len(self._records) - len(live)
        self._records = live

    def _forget_sightings_of(self, record: PeerRecord) -> None:
        """Forget the sightings of a peer that has registered, under any owner."""
        for other in self.at(record.peer):
            if other is not record and _is_sighting_of(other, record.peer):
                self.forget(other)

    def _make_room(self, owner: str, now_s: float) -> None:
        self._forget_expired(now_s)
        num_own = sum(key[0] == owner for key in self._records)
        # Shared peers count by themselves: all tenants together cannot keep a storage server out.
        num_counted = num_own if owner == SHARED_OWNER else len(self._records)
        if num_counted >= self._limits.max_peers:
            raise CapacityError(f"max_peers ({self._limits.max_peers}) is reached")
        if num_own >= self._limits.max_peers_per_owner:
            raise CapacityError(
                f"max_peers_per_tenant ({self._limits.max_peers_per_owner}) is reached"
            )


def _is_sighting_of(record: PeerRecord, peer: Peer) -> bool:
    """Return whether a registered peer replaces that record; a sidecar's never replaces a storage
    server's.
    """
    return record.peer.incarnation == 0 and record.peer.kind == peer.kind
