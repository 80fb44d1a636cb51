import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import (
    BrokerClient,
    CopyOrder,
    DrainReport,
    Lease,
    Peer,
    PeerFigures,
    PeerRegistration,
)

from tests.fixtures.waiting import until

pytestmark = pytest.mark.virtual_time

PEER = Peer(id="a", incarnation=1, distributed_url="lm://10.0.0.1:65433")


class FakeBroker(BrokerClient):
    """A broker in memory that can be away, can forget, and can ask for copies.

    Attributes:
        known: Whether each peer that it knows drains.
        asked: What peers said at each registration.
    """

    def __init__(self) -> None:
        super().__init__("http://broker", None, 1.0)
        self.away = False
        self.ttl_ms = 15_000
        self.known: dict[str, bool] = {}
        self.asked: list[dict[str, Any]] = []
        self.drained = False
        self.heeds_wishes = True
        self.copies: tuple[CopyOrder, ...] = ()

    async def register(self, peer: Peer, *, draining: bool = False, **said: Any) -> Lease:
        self.asked.append({"incarnation": peer.incarnation, **said})
        if self.away:
            raise UnavailableError("away")
        self.known[peer.id] = draining
        is_draining = (draining and self.heeds_wishes) or self.drained
        return Lease(self.ttl_ms, is_draining, self.copies)

    async def deregister(self, instance_id: str) -> None:
        if self.away:
            raise UnavailableError("away")
        self.known.pop(instance_id, None)


class Listener:
    """Notes the broker's requests."""

    def __init__(self) -> None:
        self.num_drains = 0
        self.orders: list[CopyOrder] = []
        self.report: DrainReport | None = None

    def drain_wanted(self) -> None:
        self.num_drains += 1
        self.report = DrainReport("writing", 4, 0, 0, 0, 4)

    def copies_wanted(self, orders: Sequence[CopyOrder]) -> None:
        self.orders += orders

    def drain_report(self) -> DrainReport | None:
        return self.report


async def opened(broker: BrokerClient, *args: Any, **options: Any) -> PeerRegistration:
    registration = PeerRegistration(broker, PEER, *args, **options)
    await registration.open()
    return registration


async def test_lease_is_renewed_with_present_figures_until_it_is_ended() -> None:
    broker, counts = FakeBroker(), itertools.count()
    loads = iter([0.25, 0.5] + [0.75] * 1000)
    registration = await opened(
        broker, lambda: next(loads), figures=lambda: PeerFigures(requested_chunks=next(counts))
    )
    assert not registration.registered
    await asyncio.sleep(600.0)
    assert registration.registered
    said = broker.asked[:3]
    assert [(each["load"], each["figures"].requested_chunks) for each in said] == [
        (0.25, 0),
        (0.5, 1),
        (0.75, 2),
    ]
    await registration.close()
    assert broker.known == {}
    assert not registration.registered


@pytest.mark.parametrize("ttl_ms", [600_000, None])
async def test_renewals_follow_the_lease_that_is_granted(ttl_ms: int | None) -> None:
    broker = FakeBroker()
    registration = await opened(broker, ttl_ms=ttl_ms)
    await until(lambda: broker.known)
    await asyncio.sleep(14.0)
    assert {each["ttl_ms"] for each in broker.asked} == {ttl_ms}
    assert len(broker.asked) == 3
    await registration.close()


async def test_unavailable_broker_is_logged_once_and_found_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lmcache_core.p2p")
    broker = FakeBroker()
    broker.away = True
    registration = await opened(broker)
    await asyncio.sleep(60.0)
    assert len(broker.asked) > 4
    assert not registration.registered
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    broker.away = False
    await until(lambda: registration.registered)
    broker.away = True
    await until(lambda: not registration.registered)
    await registration.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert [record.getMessage() for record in caplog.records][:2] == [
        "broker unavailable, retrying: peer=a error=away",
        "lease granted: peer=a ttl_ms=15000",
    ]


async def test_broker_that_forgot_learns_of_the_drain_again() -> None:
    broker = FakeBroker()
    registration = await opened(broker)
    await until(lambda: "a" in broker.known)
    broker.drained = True
    await until(lambda: registration.draining)
    broker.known, broker.drained = {}, False
    await until(lambda: broker.known == {"a": True})
    await registration.close()


async def test_own_drain_is_announced_at_once_and_is_no_request_of_the_broker() -> None:
    broker, listener = FakeBroker(), Listener()
    registration = await opened(broker, listener=listener)
    await until(lambda: broker.known == {"a": False})
    registration.drain()
    async with asyncio.timeout(0.2):
        await until(lambda: broker.known == {"a": True})
    await registration.close()
    assert listener.num_drains == 0


async def test_requests_of_the_broker_are_passed_on_and_the_drain_is_reported() -> None:
    broker, listener = FakeBroker(), Listener()
    broker.copies = (CopyOrder("0" * 32, "b", "lm://b:1"),)
    registration = await opened(broker, listener=listener)
    await until(lambda: len(listener.orders) >= 1)
    assert (listener.num_drains, broker.asked[0]["drain"]) == (0, None)
    broker.drained = True
    await asyncio.sleep(60.0)
    assert listener.num_drains == 1
    assert broker.asked[-1]["drain"] == listener.report
    await registration.close()


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_close_ends_right_after_a_drain(turns: int) -> None:
    """Turns of the loop between both: the registration is woken and cancelled at once."""
    broker = FakeBroker()
    registration = await opened(broker)
    await until(lambda: registration.registered)
    await asyncio.sleep(0.1)  # it waits for its next renewal
    registration.drain()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(3.0):
        await registration.close()
    assert broker.known == {}


async def test_drain_ends_with_its_incarnation_and_late_answers_do_not_bring_it_back() -> None:
    class Slow(FakeBroker):
        """Answers the first renewal after a drain only when it may, with that drain."""

        may_answer = asyncio.Event()

        async def register(self, peer: Peer, **options: Any) -> Lease:
            lease = await super().register(peer, **options)
            if options["draining"]:
                await self.may_answer.wait()
            return lease

    broker = Slow()
    registration = await opened(broker)
    await until(lambda: registration.registered)
    registration.drain()
    await until(lambda: broker.known == {"a": True})
    registration.undrain()
    broker.may_answer.set()
    await until(lambda: broker.known == {"a": False})
    assert not registration.draining
    assert broker.asked[0]["incarnation"] == 1 < broker.asked[-1]["incarnation"]
    await registration.close()


async def test_close_while_the_broker_is_away_is_quiet() -> None:
    broker = FakeBroker()
    registration = await opened(broker)
    await until(lambda: registration.registered)
    broker.away = True
    await registration.close()
    await PeerRegistration(broker, PEER).close()


async def test_drain_outlives_an_answer_that_does_not_name_it() -> None:
    """It may answer an earlier renewal."""
    broker = FakeBroker()
    broker.heeds_wishes = False
    registration = await opened(broker)
    await until(lambda: registration.registered)
    registration.drain()
    await asyncio.sleep(60.0)
    assert registration.draining
    assert broker.known == {"a": True}
    await registration.close()
