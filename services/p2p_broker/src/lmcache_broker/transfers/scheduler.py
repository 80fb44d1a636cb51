"""Grants pulls, and queues requests while all their holders are busy.

The next free slot goes to the tenant with the fewest pulls underway, then to its requester with the
fewest, then to the first in the queue. While a request waits for a peer, no later one is served
there first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.p2p.messages import (
    MAX_WAIT_MS,
    Assignment,
    ChunkHolders,
    Renewal,
    TransferResponse,
)
from lmcache_core.security import Principal, TicketSigner, unix_ms

from lmcache_broker.peers.pulls import Requester
from lmcache_broker.peers.record import PeerRecord, peer_id_of
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.transfers.choice import choose
from lmcache_broker.transfers.hot import ORDER_TTL_S, HotChunks

MAX_WAITING: Final = 1024
MAX_WAITING_PER_TENANT: Final = 256
LOOK_INTERVAL_S: Final = 0.05
"""How often the queue checks for slots freed by other brokers or by expired tickets."""
MAX_ROUNDS: Final = 4
"""Attempts per request: a slot that looked free may have been taken through another broker."""
PULL_ID_BYTES: Final = 9


@dataclass(slots=True, eq=False)
class _Waiter:
    principal: Principal
    requester: str
    wanted: Mapping[str, ChunkHolders]
    holders: Mapping[str, str]
    number: int
    without_place: TransferResponse
    answer: asyncio.Future[TransferResponse]


class TransferScheduler:
    """Answers requests immediately, or when a slot is free.

    Args:
        signer: Signs tickets; replaced when keys rotate.
        max_pulls: Pulls that one peer serves at a time.
        ticket_ttl_ms: Lifetime of a ticket; a pull whose end is not reported ends with it.
        hot: Counts pulls by chunk; None if hot chunks are not copied.
        clock: Seconds, monotonic; the registry's.

    Attributes:
        num_queued: Requests that had to wait, since the start.
        num_turned_away: Requests refused because the queue, or their tenant's share of it, was
            full.
        num_pulls: Tickets signed for new pulls.
        num_assigned: Chunks in these pulls.
        num_unassigned: Chunks that no live peer could serve.
    """

    def __init__(
        self,
        registry: PeerRegistry,
        signer: TicketSigner,
        *,
        max_pulls: int,
        ticket_ttl_ms: int,
        hot: HotChunks | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._registry = registry
        self._signer = signer
        self._max_pulls = max_pulls
        self._ticket_ttl_ms = ticket_ttl_ms
        self._hot = hot
        self._clock = clock
        self._wall_ms = wall_ms
        self.waiting: list[_Waiter] = []
        self._held_back: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._freed = asyncio.Event()
        self._tasks = TaskSupervisor("broker-transfers", max_tasks=1)
        self.num_queued = 0
        self.num_turned_away = 0
        self.num_pulls = 0
        self.num_assigned = 0
        self.num_unassigned = 0

    async def open(self) -> None:
        """Start serving the queue."""
        self._tasks.repeat("queue", self._serve_queue, 0.001)  # it waits by itself

    async def close(self) -> None:
        """Answer the waiting requests without a slot."""
        await self._tasks.close()
        for waiter in self.waiting:
            if not waiter.answer.done():
                waiter.answer.set_result(waiter.without_place)

    async def ask(
        self, principal: Principal, requester: str, wanted: Mapping[str, ChunkHolders], wait_ms: int
    ) -> TransferResponse:
        """Assign chunks to peers, immediately or when a slot is free.

        Args:
            principal: The caller. Its tenant goes into the tickets; peers visible to it may serve
                it.
            requester: The instance that will pull; never chosen itself.
            wanted: Possible holders of each chunk, by chunk id. Unknown ids are ignored.
            wait_ms: How long to wait for a holder if no chunk can be assigned because all are busy.
        """
        plan = await self._assign(principal, requester, wanted, set(self._held_back))
        if plan.busy and not plan.assignments and wait_ms > 0:
            plan = await self._wait(principal, requester, wanted, plan, wait_ms)
        self.num_pulls += len(plan.assignments)
        self.num_assigned += sum(len(pull.chunk_ids) for pull in plan.assignments)
        self.num_unassigned += len(plan.unassigned)
        if self._hot is not None:
            placed = self._hot.note(principal, requester, wanted, plan, self._clock())
            if placed and await self._registry.order_copies(placed, ORDER_TTL_S):
                self._hot.hand_on(placed)
        return plan

    async def end(self, principal: Principal, requester: str, pull_ids: Sequence[str]) -> int:
        """End pulls before their tickets expire, and return how many there were; unknown ones, and
        those of another requester, are ignored.
        """
        who = Requester(principal.tenant, requester)
        num_ended = await self._registry.end_pulls(who, pull_ids)
        if num_ended:
            self._freed.set()
        return num_ended

    async def renew(
        self, principal: Principal, requester: str, pull_ids: Sequence[str]
    ) -> list[Renewal]:
        """Extend pulls by the lifetime of another ticket, except unknown ones, those of another
        requester, of a peer that is gone, or older than `MAX_PULL_S`.
        """
        await self._registry.refresh()
        self._registry.book.expire(self._clock())
        who, ttl_ms = Requester(principal.tenant, requester), self._ticket_ttl_ms
        lives = await self._registry.renew_pulls(who, pull_ids, ttl_ms / 1000)
        renewed: list[Renewal] = []
        for pull_id, life in lives.items():
            record = self._registry.directory.find(principal, peer_id_of(life))
            if record is not None and record.life == life:
                renewed.append(Renewal(pull_id, *self._sign(who, record), ttl_ms))
        return renewed

    async def _assign(
        self,
        principal: Principal,
        requester: str,
        wanted: Mapping[str, ChunkHolders],
        held_back: Collection[str] = (),
    ) -> TransferResponse:
        """Choose a peer for each chunk and count the pulls against them.

        Args:
            held_back: `PeerRecord.field` of peers to count as busy.
        """
        await self._registry.refresh()
        self._registry.book.expire(self._clock())
        find = partial(self._registry.directory.find, principal)
        pulls: list[Assignment] = []
        unheld: list[str] = []
        full = set(held_back)
        who = Requester(principal.tenant, requester)
        rest = dict(wanted)
        for _ in range(MAX_ROUNDS):
            choice = choose(find, self._max_pulls, requester, rest, self._clock(), full)
            unheld += choice.unheld
            offers = [
                (record, secrets.token_urlsafe(PULL_ID_BYTES))
                for peer_id in choice.by_peer
                if (record := find(peer_id)) is not None
            ]
            verdicts = await self._registry.claim(
                who, offers, self._max_pulls, self._ticket_ttl_ms / 1000
            )
            for (record, pull_id), is_granted in zip(offers, verdicts, strict=True):
                if not is_granted:
                    full.add(record.field)
                    continue
                peer, chunk_ids = record.peer, list(choice.by_peer[record.peer.id])
                ticket, expires_ms = self._sign(who, record)
                pulls.append(
                    Assignment(
                        peer.id,
                        peer.distributed_url,
                        chunk_ids,
                        ticket,
                        expires_ms,
                        pull_id,
                        self._ticket_ttl_ms,
                    )
                )
            settled = {chunk_id for pull in pulls for chunk_id in pull.chunk_ids} | set(unheld)
            rest = {
                chunk_id: chunk for chunk_id, chunk in wanted.items() if chunk_id not in settled
            }
            if all(verdicts):
                break
        unserved = {*rest, *unheld}
        unassigned = [chunk_id for chunk_id in wanted if chunk_id in unserved]
        return TransferResponse(pulls, unassigned, busy=list(rest))

    def _sign(self, who: Requester, record: PeerRecord) -> tuple[str, int]:
        expires_ms = self._wall_ms() + self._ticket_ttl_ms
        ticket = self._signer.sign(
            instance=record.peer.id,
            requester=who.instance,
            tenant=who.tenant,
            expires_unix_ms=expires_ms,
        )
        return ticket, expires_ms

    async def _wait(
        self,
        principal: Principal,
        requester: str,
        wanted: Mapping[str, ChunkHolders],
        plan: TransferResponse,
        wait_ms: int,
    ) -> TransferResponse:
        num_own = sum(waiter.principal.tenant == principal.tenant for waiter in self.waiting)
        if len(self.waiting) >= MAX_WAITING or num_own >= MAX_WAITING_PER_TENANT:
            self.num_turned_away += 1
            return plan
        self.num_queued += 1
        # Only peers that could serve it: a request must not block others by naming a peer.
        named = {holder for chunk_id in plan.busy for holder in wanted[chunk_id].holders}
        records = (self._registry.directory.find(principal, holder) for holder in named)
        holders = {
            record.field: record.peer.id
            for record in records
            if record is not None and not record.draining
        }
        answer: asyncio.Future[TransferResponse] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(principal, requester, wanted, holders, next(self._numbers), plan, answer)
        self.waiting.append(waiter)
        self._held_back.update(holders.keys())
        self._freed.set()
        try:
            async with asyncio.timeout(min(wait_ms, MAX_WAIT_MS) / 1000):
                return await answer
        except TimeoutError:
            # It may have been served at the moment of its timeout: then its slot is taken, and
            # should be used.
            return answer.result() if answer.done() and not answer.cancelled() else plan
        finally:
            self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> None:
        if waiter not in self.waiting:
            return
        self.waiting.remove(waiter)
        for field in waiter.holders:
            self._held_back[field] -= 1
            if self._held_back[field] <= 0:
                del self._held_back[field]

    async def _serve_queue(self) -> None:
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_INTERVAL_S if self.waiting else None):
                await self._freed.wait()
        self._registry.book.expire(self._clock())
        await self._registry.refresh()
        while await self._serve_one():
            pass

    async def _serve_one(self) -> bool:
        """Serve the first waiter, in order of fairness, for which there is a slot; return whether
        there was one.
        """

        def turn(waiter: _Waiter) -> tuple[int, int, int]:
            who = Requester(waiter.principal.tenant, waiter.requester)
            return (*self._registry.book.share(who), waiter.number)

        for waiter in sorted(self.waiting, key=turn):
            if waiter.answer.done() or not self._has_room(waiter):
                continue
            plan = await self._assign(waiter.principal, waiter.requester, waiter.wanted)
            if not plan.assignments:
                continue
            if waiter.answer.done():  # it has left since
                who = Requester(waiter.principal.tenant, waiter.requester)
                await self._registry.end_pulls(who, [pull.pull for pull in plan.assignments])
                return True
            waiter.answer.set_result(plan)
            self._leave(waiter)
            return True
        return False

    def _has_room(self, waiter: _Waiter) -> bool:
        now_s = self._clock()
        found = (
            self._registry.directory.find(waiter.principal, holder)
            for holder in waiter.holders.values()
        )
        return any(
            record is not None and not record.draining and record.num_pulls(now_s) < self._max_pulls
            for record in found
        )
