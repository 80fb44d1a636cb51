"""Decides who serves which chunks and signs the tickets."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lmcache_core.security import Principal, TicketSigner, unix_ms

from lmcache_broker.peers.record import PeerRecord
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.transfers.choice import Chooser, WantedFrom
from lmcache_broker.transfers.pulls import PullBook

MAX_ROUNDS: Final = 4
"""Choices for one request: a peer that looked free may have been taken through another broker."""
PULL_ID_BYTES: Final = 9


@dataclass(frozen=True, slots=True)
class GrantedPull:
    """Chunks that one peer serves to the requester.

    Attributes:
        instance: Its id.
        distributed_url: Its address.
        chunk_ids: As they were asked for, in that order.
        ticket: Good for this peer, requester and tenant.
        expires_ms: End of the ticket, Unix time in milliseconds.
        pull: What the requester calls it by when it is over.
    """

    instance: str
    distributed_url: str
    chunk_ids: Sequence[str]
    ticket: str
    expires_ms: int
    pull: str


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Every chunk of a request, in exactly one place.

    Attributes:
        assignments: At most one per peer.
        unassigned: Chunks that no live holder can serve now.
        busy: Those of them that somebody holds who serves as many pulls as he may.
    """

    assignments: Sequence[GrantedPull]
    unassigned: Sequence[str]
    busy: Sequence[str] = ()


@dataclass(slots=True)
class TransferFigures:
    """What has been decided since the start."""

    num_pulls: int = 0
    num_assigned: int = 0
    num_unassigned: int = 0


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Bounds of pulls.

    Attributes:
        max_pulls: Pulls that one peer serves at once.
        ticket_ttl_ms: Life of a ticket; a pull whose end nobody tells ends with it.
    """

    max_pulls: int
    ticket_ttl_ms: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """What time it is.

    Attributes:
        monotonic: Seconds, the directory's.
        wall_ms: Unix time in milliseconds, for tickets.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall_ms: Callable[[], int] = unix_ms


@dataclass(slots=True)
class TransferService:
    """Grants pulls, at most `max_pulls` per peer at once.

    Attributes:
        registry: Who is alive, and has room.
        signer: Signs tickets; replaced when keys rotate.
        limits: Bounds.
        clocks: What time it is.
        book: Pulls that this broker has granted.
        figures: Counts since the start.
    """

    registry: PeerRegistry
    signer: TicketSigner
    limits: TransferLimits
    clocks: Clocks = field(default_factory=Clocks)
    book: PullBook = field(default_factory=PullBook)
    figures: TransferFigures = field(default_factory=TransferFigures)

    async def assign(
        self, principal: Principal, requester: str, wanted: Mapping[str, WantedFrom], held_back: Collection[str] = ()
    ) -> TransferPlan:
        """Choose a peer for each chunk and count the pulls against them.

        Args:
            principal: Its tenant goes into the tickets, and it is served by peers that it sees.
            requester: The instance that will pull; never chosen itself.
            wanted: Who may hold each chunk. Unknown ids are passed over.
            held_back: Ids of peers to count as busy.
        """
        await self.registry.refresh()
        self.book.expire(self.clocks.monotonic())
        chooser = Chooser(self.registry.directory, self.limits.max_pulls)
        pulls: list[GrantedPull] = []
        unheld: list[str] = []
        full = set(held_back)
        rest = dict(wanted)
        for _ in range(MAX_ROUNDS):
            choice = chooser.choose(principal, requester, rest, self.clocks.monotonic(), full)
            unheld += choice.unheld
            offers = [(record, _new_id()) for peer_id in choice.by_peer if (record := self._record(principal, peer_id)) is not None]
            verdicts = await self.registry.claim(offers, self.limits.max_pulls, self.limits.ticket_ttl_ms / 1000)
            for (record, pull_id), is_granted in zip(offers, verdicts, strict=True):
                if is_granted:
                    pulls.append(self._grant(principal, requester, record, choice.by_peer[record.peer.id], pull_id))
                else:
                    full.add(record.peer.id)
            settled = {chunk_id for pull in pulls for chunk_id in pull.chunk_ids} | set(unheld)
            rest = {chunk_id: chunk for chunk_id, chunk in wanted.items() if chunk_id not in settled}
            if all(verdicts):
                break
        unassigned = [chunk_id for chunk_id in wanted if chunk_id in rest or chunk_id in set(unheld)]
        return TransferPlan(pulls, unassigned, list(rest))

    def count(self, plan: TransferPlan) -> None:
        """Count what a request has come to."""
        self.figures.num_pulls += len(plan.assignments)
        self.figures.num_assigned += sum(len(pull.chunk_ids) for pull in plan.assignments)
        self.figures.num_unassigned += len(plan.unassigned)

    async def end(self, principal: Principal, requester: str, pull_ids: Sequence[str]) -> int:
        """Pulls are over. Those that are not known, or not the caller's, are passed over.

        Returns:
            How many there were.
        """
        ended = [pull for pull_id in pull_ids if (pull := self.book.end(pull_id, principal.tenant, requester)) is not None]
        await self.registry.end_pulls([(pull.record, pull.pull_id) for pull in ended])
        return len(ended)

    def _record(self, principal: Principal, peer_id: str) -> PeerRecord | None:
        return self.registry.directory.find(principal, peer_id)

    def _grant(self, principal: Principal, requester: str, record: PeerRecord, chunk_ids: Sequence[str], pull_id: str) -> GrantedPull:
        peer, ttl_ms = record.peer, self.limits.ticket_ttl_ms
        expires_ms = self.clocks.wall_ms() + ttl_ms
        ticket = self.signer.sign(instance=peer.id, requester=requester, tenant=principal.tenant, expires_unix_ms=expires_ms)
        self.book.add(pull_id, principal.tenant, requester, record, self.clocks.monotonic() + ttl_ms / 1000)
        return GrantedPull(peer.id, peer.distributed_url, chunk_ids, ticket, expires_ms, pull_id)


def _new_id() -> str:
    return secrets.token_urlsafe(PULL_ID_BYTES)
