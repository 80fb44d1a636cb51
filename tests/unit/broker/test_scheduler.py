"""The queue for pulls of busy peers: who is next, and that each wait ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from lmcache_broker.peers import pulls
from lmcache_broker.peers.directory import PeerDirectory, PeerLimits
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.transfers import scheduler as module
from lmcache_core.p2p.messages import ChunkHolders, TransferResponse
from lmcache_core.security import Principal, TicketVerifier

from tests.fixtures.broker import (
    ACME,
    KEYS,
    OPERATOR,
    RIVAL,
    FakeClock,
    announce,
    peer,
    transfer_scheduler,
)
from tests.fixtures.virtual_time import CLOCK
from tests.fixtures.waiting import until

pytestmark = pytest.mark.virtual_time

MAX_PULLS = 2
TTL_MS = 5_000
WAIT_MS = 5_000


class Office:
    """A scheduler, and one shared peer `a` that serves two pulls at a time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.directory = PeerDirectory(PeerLimits(100, 100, 3_600_000), self.clock)
        self.scheduler = transfer_scheduler(
            self.directory, self.clock, max_pulls=MAX_PULLS, ticket_ttl_ms=TTL_MS
        )
        announce(self.directory, OPERATOR, peer("a"))
        self.served: list[str] = []

    async def ask(
        self,
        requester: str,
        who: Principal = ACME,
        wait_ms: int = WAIT_MS,
        holders: tuple[str, ...] = ("a",),
    ) -> TransferResponse:
        plan = await self.scheduler.ask(
            who, requester, {"c": ChunkHolders("c", list(holders))}, wait_ms
        )
        if plan.assignments:
            self.served.append(requester)
        return plan

    async def queue(self, requester: str, who: Principal = ACME) -> asyncio.Task[TransferResponse]:
        before = len(self.scheduler.waiting)
        task = asyncio.create_task(self.ask(requester, who))
        await until(lambda: len(self.scheduler.waiting) > before)
        return task

    async def end(self, plan: TransferResponse, requester: str, who: Principal = ACME) -> None:
        assert (
            await self.scheduler.end(who, requester, [pull.pull for pull in plan.assignments]) == 1
        )

    async def until_served(self, *requesters: str) -> None:
        await until(lambda: self.served[-len(requesters) :] == list(requesters))


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    running = Office()
    await running.scheduler.open()
    yield running
    await running.scheduler.close()
    assert not running.scheduler.waiting


async def test_request_waits_for_busy_holders_as_long_as_it_says(office: Office) -> None:
    for name in ("r1", "r2"):
        await office.ask(name)
    for wait_ms in (0, WAIT_MS):
        began_s = CLOCK()
        plan = await office.ask("r3", wait_ms=wait_ms)
        assert (plan.assignments, plan.unassigned, plan.busy) == ([], ["c"], ["c"])
        assert CLOCK() - began_s == pytest.approx(wait_ms / 1000, abs=0.01)
    assert (await office.ask("r4", wait_ms=WAIT_MS, holders=("unknown",))).busy == []


@pytest.mark.parametrize("end", ["reported", "of its ticket"])
async def test_free_slot_goes_to_a_waiter(office: Office, end: str) -> None:
    first = await office.ask("r1")
    await office.ask("r2")
    waiting = await office.queue("r3")
    if end == "reported":
        await office.end(first, "r1")
    else:
        office.clock.now_s += TTL_MS / 1000
    assert len((await waiting).assignments) == 1


async def test_the_tenant_with_the_fewest_pulls_is_next_then_its_requester(office: Office) -> None:
    """One that asks for a hundred pulls does not keep another one waiting for all of them."""
    held = [await office.ask("greedy"), await office.ask("greedy")]
    tasks = [
        await office.queue("greedy"),
        await office.queue("greedy"),
        await office.queue("modest"),
        await office.queue("other", RIVAL),
    ]
    await office.end(held[0], "greedy")
    await office.until_served("other")
    await office.end(await tasks[3], "other", RIVAL)
    await office.until_served("other", "modest")
    await office.end(await tasks[2], "modest")
    await office.until_served("other", "modest", "greedy")
    await office.end(held[1], "greedy")
    await office.until_served("other", "modest", "greedy", "greedy")
    await asyncio.gather(*tasks)


async def test_later_request_does_not_overtake_a_waiter(office: Office) -> None:
    first = await office.ask("r1")
    await office.ask("r2")
    waiting = await office.queue("r3")
    record = office.directory.find(ACME, "a")
    assert record is not None
    del record.pulls[first.assignments[0].pull]  # free, and the queue has not looked yet
    assert (await office.ask("r4", wait_ms=0)).assignments == []
    assert len((await waiting).assignments) == 1


async def test_cancelled_waiter_takes_no_slot(office: Office) -> None:
    first = await office.ask("r1")
    await office.ask("r2")
    waiting = await office.queue("r3")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await office.end(first, "r1")
    await asyncio.sleep(1)
    assert office.directory.get(ACME, "a").num_pulls == MAX_PULLS - 1


async def test_waiter_cancelled_while_it_is_served_takes_no_slot(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await office.ask("r1")
    await office.ask("r2")
    waiting = await office.queue("r3")
    refresh, num_refreshed = PeerRegistry.refresh, 0

    async def giving_up(registry: PeerRegistry) -> None:
        nonlocal num_refreshed
        num_refreshed += 1
        if num_refreshed == 2:  # the queue was looked at, and a place is about to be given
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await refresh(registry)

    monkeypatch.setattr(PeerRegistry, "refresh", giving_up)
    await office.end(first, "r1")
    await until(lambda: num_refreshed == 2)
    assert len((await office.ask("r4", wait_ms=0)).assignments) == 1


async def test_waiter_blocks_no_peer_that_it_cannot_see(office: Office) -> None:
    """It may name any id as a holder, also that of another tenant's peer."""
    announce(office.directory, RIVAL, peer("theirs"))
    for name in ("r1", "r2"):
        await office.ask(name)
    waiting = asyncio.create_task(office.ask("r3", holders=("a", "theirs")))
    await until(lambda: office.scheduler.waiting)
    assert len((await office.ask("r", RIVAL, wait_ms=0, holders=("theirs",))).assignments) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_waiter_served_at_the_end_of_its_time_has_its_slot(office: Office) -> None:
    """Otherwise the slot would stay taken, unused, until its ticket ends."""
    for name in ("r1", "r2"):
        await office.ask(name)
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(office.ask("r3", wait_ms=1000))
    await until(lambda: office.scheduler.waiting)
    (waiter,) = office.scheduler.waiting
    served = TransferResponse(assignments=[], unassigned=["c"], busy=[])
    # Its time is over when the loop looks next, and right before that it is served.
    CLOCK.now_s += 1.1
    loop.call_soon(waiter.answer.set_result, served)
    assert (await waiting) is served


async def test_only_its_requester_renews_a_pull(office: Office) -> None:
    plan = await office.ask("r1")
    (pull,) = plan.assignments
    for _ in range(3):
        office.clock.now_s += TTL_MS / 1000 * 0.6
        assert await office.scheduler.renew(ACME, "r2", [pull.pull]) == []
        assert await office.scheduler.renew(RIVAL, "r1", [pull.pull]) == []
        (renewed,) = await office.scheduler.renew(ACME, "r1", [pull.pull, "unheard-of"])
        assert (renewed.pull, renewed.ttl_ms) == (pull.pull, TTL_MS)
        assert (
            TicketVerifier(KEYS, "a", office.clock.unix_ms).verify(renewed.ticket).requester == "r1"
        )
    assert office.directory.get(ACME, "a").num_pulls == 1
    office.clock.now_s += TTL_MS / 1000
    assert await office.scheduler.renew(ACME, "r1", [pull.pull]) == [], "it has ended"
    assert office.directory.get(ACME, "a").num_pulls == 0


async def test_pull_is_not_renewed_beyond_its_bound_or_at_another_life_of_its_peer(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = (await office.ask("r1")).assignments
    monkeypatch.setattr(pulls, "MAX_PULL_S", 4.0)
    office.clock.now_s += 4.5
    assert await office.scheduler.renew(ACME, "r1", [old.pull]) == []
    (pull,) = (await office.ask("r2")).assignments
    announce(office.directory, OPERATOR, peer("a", incarnation=2))
    assert await office.scheduler.renew(ACME, "r2", [pull.pull]) == []


async def test_the_queue_is_bounded_for_each_tenant_and_for_all(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    monkeypatch.setattr(module, "MAX_WAITING_PER_TENANT", 2)
    for name in ("r1", "r2"):
        await office.ask(name)
    tasks = [await office.queue("r3"), await office.queue("r4")]
    assert (await office.ask("r5")).busy == ["c"], "its tenant's share is full"
    tasks.append(await office.queue("r6", RIVAL))
    assert (await office.ask("r7", OPERATOR)).busy == ["c"], "all of it is full"
    assert office.scheduler.num_turned_away == 2
    await office.scheduler.close()
    assert all(plan.busy == ["c"] for plan in await asyncio.gather(*tasks))


async def test_memory_before_disk_but_near_before_far() -> None:
    office = Office()
    announce(office.directory, ACME, peer("me", node="n1"))
    for name, node, load in (("disk", "n2", 0.0), ("memory", "n3", 0.4), ("here", "n1", 0.9)):
        announce(office.directory, ACME, peer(name, node=node), load=load)

    async def chosen(*holders: tuple[str, str]) -> str:
        names, tiers = zip(*holders, strict=True)
        wanted = {"c": ChunkHolders("c", list(names), list(tiers))}
        plan = await office.scheduler.ask(ACME, "me", wanted, 0)
        await office.scheduler.end(ACME, "me", [pull.pull for pull in plan.assignments])
        return plan.assignments[0].instance

    disk, memory = ("disk", "disk"), ("memory", "memory")
    assert await chosen(disk, memory) == "memory"
    assert await chosen(("disk", "memory"), memory) == "disk", "then the idle one"
    assert await chosen(disk, memory, ("here", "disk")) == "here"
