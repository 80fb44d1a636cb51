"""Decides who serves which chunks and signs the tickets."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from lmcache_core.security import Principal, TicketSigner, unix_ms

from lmcache_broker.bodies import AssignmentView, RenewedView, TransferView
from lmcache_broker.peers.pulls import Requester
from lmcache_broker.peers.record import PeerRecord, peer_id_of
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.transfers.choice import WantedFrom, choose

MAX_ROUNDS: Final = 4
"""Choices for one request: a peer that looked free may have been taken through another broker."""
PULL_ID_BYTES: Final = 9


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
        ticket_ttl_ms: Life of a ticket; a pull whose end is not reported ends with it.
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
        figures: Counts since the start.
    """

    registry: PeerRegistry
    signer: TicketSigner
    limits: TransferLimits
    clocks: Clocks = field(default_factory=Clocks)
    figures: TransferFigures = field(default_factory=TransferFigures)

    async def assign(
        self,
        principal: Principal,
        requester: str,
        wanted: Mapping[str, WantedFrom],
        held_back: Collection[str] = (),
    ) -> TransferView:
        """Choose a peer for each chunk and count the pulls against them.

        Args:
            principal: Its tenant goes into the tickets, and it is served by peers that it sees.
            requester: The instance that will pull; never chosen itself.
            wanted: Who may hold each chunk. Unknown ids are passed over.
            held_back: `PeerRecord.field` of peers to count as busy.
        """
        await self.registry.refresh()
        self.registry.book.expire(self.clocks.monotonic())
        find = self.registry.directory.find
        pulls: list[AssignmentView] = []
        unheld: list[str] = []
        full = set(held_back)
        who = Requester(principal.tenant, requester)
        rest = dict(wanted)
        for _ in range(MAX_ROUNDS):
            now_s, max_pulls = self.clocks.monotonic(), self.limits.max_pulls
            choice = choose(partial(find, principal), max_pulls, requester, rest, now_s, full)
            unheld += choice.unheld
            offers = [
                (record, secrets.token_urlsafe(PULL_ID_BYTES))
                for peer_id in choice.by_peer
                if (record := find(principal, peer_id)) is not None
            ]
            verdicts = await self.registry.claim(
                who, offers, max_pulls, self.limits.ticket_ttl_ms / 1000
            )
            for (record, pull_id), is_granted in zip(offers, verdicts, strict=True):
                if is_granted:
                    ticket, expires_ms = self._sign(who, record)
                    pulls.append(
                        AssignmentView(
                            instance=record.peer.id,
                            distributed_url=record.peer.distributed_url,
                            chunk_ids=list(choice.by_peer[record.peer.id]),
                            ticket=ticket,
                            expires_ms=expires_ms,
                            pull=pull_id,
                            ttl_ms=self.limits.ticket_ttl_ms,
                        )
                    )
                else:
                    full.add(record.field)
            settled = {chunk_id for pull in pulls for chunk_id in pull.chunk_ids} | set(unheld)
            rest = {
                chunk_id: chunk for chunk_id, chunk in wanted.items() if chunk_id not in settled
            }
            if all(verdicts):
                break
        unassigned = [
            chunk_id for chunk_id in wanted if chunk_id in rest or chunk_id in set(unheld)
        ]
        return TransferView(assignments=pulls, unassigned=unassigned, busy=list(rest))

    def count(self, plan: TransferView) -> None:
        """Count the answer to a request."""
        self.figures.num_pulls += len(plan.assignments)
        self.figures.num_assigned += sum(len(pull.chunk_ids) for pull in plan.assignments)
        self.figures.num_unassigned += len(plan.unassigned)

    async def end(self, principal: Principal, requester: str, pull_ids: Sequence[str]) -> int:
        """End pulls and return how many there were; those that are not known, or not the
        caller's, are ignored.
        """
        return await self.registry.end_pulls(Requester(principal.tenant, requester), pull_ids)

    async def renew(
        self, principal: Principal, requester: str, pull_ids: Sequence[str]
    ) -> list[RenewedView]:
        """Let pulls go on for the life of another ticket, but those that are not known, not the
        caller's, at a peer that has gone, or `MAX_PULL_S` old.
        """
        await self.registry.refresh()
        self.registry.book.expire(self.clocks.monotonic())
        who, ttl_ms = Requester(principal.tenant, requester), self.limits.ticket_ttl_ms
        renewed: list[RenewedView] = []
        for pull_id, life in (
            await self.registry.renew_pulls(who, pull_ids, ttl_ms / 1000)
        ).items():
            record = self.registry.directory.find(principal, peer_id_of(life))
            if record is not None and record.life == life:
                ticket, expires_ms = self._sign(who, record)
                renewed.append(
                    RenewedView(pull=pull_id, ticket=ticket, expires_ms=expires_ms, ttl_ms=ttl_ms)
                )
        return renewed

    def _sign(self, who: Requester, record: PeerRecord) -> tuple[str, int]:
        """Return a ticket and its end in Unix milliseconds."""
        expires_ms = self.clocks.wall_ms() + self.limits.ticket_ttl_ms
        ticket = self.signer.sign(
            instance=record.peer.id,
            requester=who.instance,
            tenant=who.tenant,
            expires_unix_ms=expires_ms,
        )
        return ticket, expires_ms
