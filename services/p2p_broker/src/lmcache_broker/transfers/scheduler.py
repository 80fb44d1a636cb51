"""Requests for pulls, and the fair queue of those that find every holder busy.

The next free place goes to the tenant with the fewest pulls underway, then to its requester with
the fewest, then to who came first. While a request waits for a peer, no later one is served
there first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.security import Principal

from lmcache_broker.bodies import MAX_WAIT_MS, RenewedView, TransferView
from lmcache_broker.peers.pulls import Requester
from lmcache_broker.transfers.choice import WantedFrom
from lmcache_broker.transfers.hot import ORDER_TTL_S, HotChunks
from lmcache_broker.transfers.service import TransferService

MAX_WAITING: Final = 1024
MAX_WAITING_PER_TENANT: Final = 256
LOOK_INTERVAL_S: Final = 0.05
"""How often the queue looks for places that other brokers, or the ends of tickets, have made
free.
"""


@dataclass(slots=True, eq=False)
class _Waiter:
    principal: Principal
    requester: str
    wanted: Mapping[str, WantedFrom]
    holders: Mapping[str, str]
    number: int
    in_vain: TransferView
    answer: asyncio.Future[TransferView]


class TransferScheduler:
    """Answers requests at once, or when a place is free.

    Args:
        service: Grants pulls.
        hot: Hears of them.

    Attributes:
        num_queued: Requests that had to wait, since the start.
        num_turned_away: Requests that would have waited, but the queue, or their tenant's share of
            it, was full.
    """

    def __init__(self, service: TransferService, hot: HotChunks | None = None) -> None:
        self._service = service
        self._hot = hot
        self._waiting: list[_Waiter] = []
        self._held_back: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._freed = asyncio.Event()
        self._tasks = TaskSupervisor("broker-transfers", max_tasks=1)
        self.num_queued = 0
        self.num_turned_away = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    async def open(self) -> None:
        """Begin to serve the queue."""
        self._tasks.repeat("queue", self._serve_queue, 0.001)  # it waits by itself

    async def close(self) -> None:
        """Answer who still waits, with nothing."""
        await self._tasks.close()
        for waiter in self._waiting:
            if not waiter.answer.done():
                waiter.answer.set_result(waiter.in_vain)

    async def ask(
        self, principal: Principal, requester: str, wanted: Mapping[str, WantedFrom], wait_ms: int
    ) -> TransferView:
        """Assign chunks to peers, at once or when a place is free.

        Args:
            principal: Who asks.
            requester: The instance that will pull.
            wanted: Who may hold each chunk.
            wait_ms: When nothing at all can be assigned because holders are busy, wait up to so
                long for one of them.
        """
        plan = await self._service.assign(principal, requester, wanted, set(self._held_back))
        if plan.busy and not plan.assignments and wait_ms > 0:
            plan = await self._wait(principal, requester, wanted, plan, wait_ms)
        self._service.count(plan)
        if self._hot is not None:
            placed = self._hot.note(
                principal, requester, wanted, plan, self._service.clocks.monotonic()
            )
            if placed and await self._service.registry.order_copies(placed, ORDER_TTL_S):
                self._hot.hand_on(placed)
        return plan

    async def end(self, principal: Principal, requester: str, pull_ids: Sequence[str]) -> int:
        """End pulls before their tickets end; returns how many there were."""
        num_ended = await self._service.end(principal, requester, pull_ids)
        if num_ended:
            self._freed.set()
        return num_ended

    async def renew(
        self, principal: Principal, requester: str, pull_ids: Sequence[str]
    ) -> list[RenewedView]:
        """Renew the tickets of pulls that are underway."""
        return await self._service.renew(principal, requester, pull_ids)

    async def _wait(
        self,
        principal: Principal,
        requester: str,
        wanted: Mapping[str, WantedFrom],
        plan: TransferView,
        wait_ms: int,
    ) -> TransferView:
        num_own = sum(waiter.principal.tenant == principal.tenant for waiter in self._waiting)
        if len(self._waiting) >= MAX_WAITING or num_own >= MAX_WAITING_PER_TENANT:
            self.num_turned_away += 1
            return plan
        self.num_queued += 1
        holders = self._busy_holders(principal, plan, wanted)
        answer: asyncio.Future[TransferView] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(principal, requester, wanted, holders, next(self._numbers), plan, answer)
        self._enter(waiter)
        self._freed.set()
        try:
            async with asyncio.timeout(min(wait_ms, MAX_WAIT_MS) / 1000):
                return await answer
        except TimeoutError:
            # Served in the very moment in which its time was over: the place is taken, and it is
            # there to be used.
            return answer.result() if answer.done() and not answer.cancelled() else plan
        finally:
            self._leave(waiter)

    def _enter(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        self._held_back.update(waiter.holders.keys())

    def _leave(self, waiter: _Waiter) -> None:
        """Take a waiter out of the queue; it may have left before."""
        if waiter not in self._waiting:
            return
        self._waiting.remove(waiter)
        for field in waiter.holders:
            self._held_back[field] -= 1
            if self._held_back[field] <= 0:
                del self._held_back[field]

    def _busy_holders(
        self, principal: Principal, plan: TransferView, wanted: Mapping[str, WantedFrom]
    ) -> dict[str, str]:
        """Ids, by `PeerRecord.field`, of those alone that it could be served by: it must not
        hold others off from a name.
        """
        named = {holder for chunk_id in plan.busy for holder in wanted[chunk_id].holders}
        records = (self._service.registry.directory.find(principal, holder) for holder in named)
        return {
            record.field: record.peer.id
            for record in records
            if record is not None and not record.draining
        }

    async def _serve_queue(self) -> None:
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_INTERVAL_S if self._waiting else None):
                await self._freed.wait()
        self._service.registry.book.expire(self._service.clocks.monotonic())
        await self._service.registry.refresh()
        while await self._serve_one():
            pass

    async def _serve_one(self) -> bool:
        """Serve the first waiter, in the order of fairness, for whom there is a place. Returns
        whether there was one.
        """
        for waiter in sorted(self._waiting, key=self._turn):
            if waiter.answer.done() or not self._has_room(waiter):
                continue
            plan = await self._service.assign(waiter.principal, waiter.requester, waiter.wanted)
            if not plan.assignments:
                continue
            if waiter.answer.done():  # it left meanwhile
                await self._service.end(
                    waiter.principal, waiter.requester, [pull.pull for pull in plan.assignments]
                )
                return True
            waiter.answer.set_result(plan)
            self._leave(waiter)
            return True
        return False

    def _turn(self, waiter: _Waiter) -> tuple[int, int, int]:
        return (
            *self._service.registry.book.share(
                Requester(waiter.principal.tenant, waiter.requester)
            ),
            waiter.number,
        )

    def _has_room(self, waiter: _Waiter) -> bool:
        service = self._service
        found = (
            service.registry.directory.find(waiter.principal, holder)
            for holder in waiter.holders.values()
        )
        now_s = service.clocks.monotonic()
        return any(
            record is not None
            and not record.draining
            and record.num_pulls(now_s) < service.limits.max_pulls
            for record in found
        )
