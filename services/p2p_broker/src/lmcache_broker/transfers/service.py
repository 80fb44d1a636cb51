"""Decides who serves which chunks and signs the tickets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_core.security import Principal, TicketSigner, unix_ms

from lmcache_broker.peers.service import PeerDirectory, PeerRecord
from lmcache_broker.transfers.choice import rank


@dataclass(frozen=True, slots=True)
class GrantedPull:
    """Chunks that one peer serves to the requester.

    Attributes:
        instance: Its id.
        distributed_url: Its address.
        chunk_ids: As they were asked for, in that order.
        ticket: Good for this peer, requester and tenant.
        expires_ms: End of the ticket, Unix time in milliseconds.
    """

    instance: str
    distributed_url: str
    chunk_ids: Sequence[str]
    ticket: str
    expires_ms: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Every chunk of a request, in exactly one place.

    Attributes:
        assignments: At most one per peer.
        unassigned: Chunks that no live holder can serve now.
    """

    assignments: Sequence[GrantedPull]
    unassigned: Sequence[str]


@dataclass(slots=True)
class TransferFigures:
    """What has been decided since the start."""

    num_pulls: int = 0
    num_assigned: int = 0
    num_unassigned: int = 0


class TransferService:
    """Grants pulls, at most `max_pulls` per peer at once; a pull ends with its ticket.

    Args:
        directory: Who is alive.
        signer: Signs tickets.
        max_pulls: Bound on pulls per peer.
        ticket_ttl_ms: Life of a ticket.
        clock: Monotonic seconds, the directory's.
        wall_clock_ms: Unix time in milliseconds, for tickets.

    Attributes:
        figures: Counts since the start.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        signer: TicketSigner,
        *,
        max_pulls: int,
        ticket_ttl_ms: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._directory = directory
        self._signer = signer
        self._max_pulls = max_pulls
        self._ticket_ttl_ms = ticket_ttl_ms
        self._clock = clock
        self._wall_clock_ms = wall_clock_ms
        self.figures = TransferFigures()

    def assign(self, principal: Principal, requester: str, holders_by_chunk: Mapping[str, Sequence[str]]) -> TransferPlan:
        """Choose a peer for each chunk and count the pulls against them.

        Args:
            principal: Its tenant goes into the tickets, and it is served by peers that it sees.
            requester: The instance that will pull; never chosen itself.
            holders_by_chunk: Who may hold each chunk. Unknown ids are passed over.
        """
        now_s = self._clock()
        ranked = self._ranked(principal, requester, holders_by_chunk, now_s)
        chunks_by_peer: dict[str, list[str]] = {}
        unassigned: list[str] = []
        for chunk_id, holders in holders_by_chunk.items():
            choice = min((holder for holder in holders if holder in ranked), key=lambda holder: ranked[holder][0], default=None)
            if choice is None:
                unassigned.append(chunk_id)
            else:
                chunks_by_peer.setdefault(choice, []).append(chunk_id)
        pulls = [self._grant(principal, requester, ranked[peer_id][1], chunk_ids, now_s) for peer_id, chunk_ids in chunks_by_peer.items()]
        self.figures.num_pulls += len(pulls)
        self.figures.num_assigned += len(holders_by_chunk) - len(unassigned)
        self.figures.num_unassigned += len(unassigned)
        return TransferPlan(pulls, unassigned)

    def _ranked(
        self, principal: Principal, requester: str, holders_by_chunk: Mapping[str, Sequence[str]], now_s: float
    ) -> dict[str, tuple[int, PeerRecord]]:
        """Position and record of every named peer that can take one more pull. A request is one pull per peer, so a free slot is enough."""
        named = {holder for holders in holders_by_chunk.values() for holder in holders} - {requester}
        found = (self._directory.find(principal, peer_id) for peer_id in named)
        able = [record for record in found if record is not None and not record.draining and record.num_pulls(now_s) < self._max_pulls]
        asking = self._directory.find(principal, requester)
        order = rank(able, requester, None if asking is None else asking.peer, self._max_pulls, now_s)
        return {record.peer.id: (position, record) for position, record in enumerate(order)}

    def _grant(self, principal: Principal, requester: str, record: PeerRecord, chunk_ids: Sequence[str], now_s: float) -> GrantedPull:
        peer = record.peer
        expires_ms = self._wall_clock_ms() + self._ticket_ttl_ms
        ticket = self._signer.sign(instance=peer.id, requester=requester, tenant=principal.tenant, expires_unix_ms=expires_ms)
        record.add_pull(now_s + self._ticket_ttl_ms / 1000)
        return GrantedPull(peer.id, peer.distributed_url, chunk_ids, ticket, expires_ms)
