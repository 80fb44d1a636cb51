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

from tests.fixtures.wire import until

PEER = Peer(id="a", incarnation=1, distributed_url="lm://10.0.0.1:65433")


class FakeBroker(BrokerClient):
    """A broker in memory that can be away, can forget, and can ask for copies."""

    def __init__(self) -> None:
        super().__init__("http://broker", None, 1.0)
        self.away = False
        self.ttl_ms = 300
        self.known: dict[str, bool] = {}
        self.loads: list[float] = []
        self.asked: list[int | None] = []
        self.num_calls = 0
        self.figures: list[PeerFigures | None] = []
        self.drained = False
        self.heeds_wishes = True
        self.copies: tuple[CopyOrder, ...] = ()
        self.reports: list[DrainReport | None] = []

    async def register(
        self,
        peer: Peer,
        *,
        load: float,
        ttl_ms: int | None,
        draining: bool = False,
        drain: DrainReport | None = None,
        figures: PeerFigures | None = None,
    ) -> Lease:
        self.figures.append(figures)
        self.reports.append(drain)
        self.num_calls += 1
        if self.away:
            raise UnavailableError("away")
        self.loads.append(load)
        self.asked.append(ttl_ms)
        self.known[peer.id] = draining
        is_draining = (draining and self.heeds_wishes) or self.drained
        return Lease(self.ttl_ms, is_draining, self.copies)

    async def deregister(self, instance_id: str) -> None:
        if self.away:
            raise UnavailableError("away")
        self.known.pop(instance_id, None)


def registered(registration: PeerRegistration) -> bool:
    """The property behind a call: the type checker would remember its first value."""
    return registration.registered


async def opened(broker: BrokerClient, **options: Any) -> PeerRegistration:
    registration = PeerRegistration(broker, PEER, **{"ttl_ms": 150, **options})
    await registration.open()
    return registration


async def test_open_registers_renews_and_close_ends_the_lease() -> None:
    broker = FakeBroker()
    loads = iter([0.25, 0.5] + [0.75] * 1000)
    registration = PeerRegistration(broker, PEER, lambda: next(loads), ttl_ms=300)
    assert not registered(registration)
    await registration.open()
    await until(lambda: len(broker.loads) >= 3)
    assert registration.registered
    assert broker.loads[:3] == [0.25, 0.5, 0.75]
    await registration.close()
    assert broker.known == {}
    assert not registered(registration)


@pytest.mark.parametrize("ttl_ms", [600_000, None])
async def test_the_lease_that_is_granted_says_when_it_is_renewed(ttl_ms: int | None) -> None:
    broker = FakeBroker()
    registration = await opened(broker, ttl_ms=ttl_ms)
    await until(lambda: len(broker.asked) >= 3)  # so soon only by the lease that it granted
    assert registration.registered
    assert set(broker.asked) == {ttl_ms}
    await registration.close()


async def test_a_broker_that_is_away_is_one_line_and_heals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lmcache_core.p2p")
    broker = FakeBroker()
    broker.away = True
    registration = await opened(broker)
    await until(lambda: broker.num_calls >= 4)
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
        "lease granted: peer=a ttl_ms=300",
    ]


async def test_a_broker_that_forgot_is_told_again_of_the_drain_too() -> None:
    broker = FakeBroker()
    registration = await opened(broker)
    await until(lambda: "a" in broker.known)
    broker.drained = True
    await until(lambda: registration.draining)
    broker.known, broker.drained = {}, False
    await until(lambda: broker.known == {"a": True})
    await registration.close()


async def test_figures_are_read_anew_for_each_renewal() -> None:
    broker = FakeBroker()
    counts = itertools.count()
    registration = await opened(broker, figures=lambda: PeerFigures(requested_chunks=next(counts)))
    await until(lambda: len(broker.figures) >= 3)
    await registration.close()
    assert broker.figures[:3] == [PeerFigures(requested_chunks=i) for i in range(3)]


async def test_an_own_drain_is_told_at_once_and_is_no_wish_of_the_broker() -> None:
    broker, listener = FakeBroker(), Listener()
    broker.ttl_ms = 600_000
    registration = await opened(broker, ttl_ms=600_000, listener=listener)
    await until(lambda: broker.known == {"a": False})
    registration.drain()
    await until(lambda: broker.known == {"a": True})
    await registration.close()
    assert listener.num_drains == 0


async def test_a_drain_survives_the_answer_to_an_earlier_renewal() -> None:
    """Also one that does not name the wish."""
    broker = FakeBroker()
    broker.heeds_wishes = False
    registration = await opened(broker)
    await until(lambda: registration.registered)
    registration.drain()
    num_calls = broker.num_calls
    await until(lambda: broker.num_calls >= num_calls + 3)
    assert registration.draining
    assert broker.known == {"a": True}
    await registration.close()


async def test_a_failing_load_reading_is_tried_again() -> None:
    broker = FakeBroker()
    num_reads = 0

    def load() -> float:
        nonlocal num_reads
        num_reads += 1
        if num_reads < 3:
            raise RuntimeError("no load yet")
        return 0.5

    registration = await opened(broker, load=load)
    await until(lambda: broker.loads == [0.5])
    await registration.close()


async def test_close_with_the_broker_away_is_quiet() -> None:
    broker = FakeBroker()
    registration = await opened(broker, ttl_ms=600_000)
    await until(lambda: registration.registered)
    broker.away = True
    await registration.close()
    await PeerRegistration(broker, PEER).close()


class Listener:
    """Notes what the broker wishes."""

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


async def test_what_the_broker_wishes_is_passed_on_and_the_drain_is_reported() -> None:
    broker, listener = FakeBroker(), Listener()
    broker.copies = (CopyOrder("0" * 32, "b", "lm://b:1"),)
    registration = await opened(broker, listener=listener)
    await until(lambda: len(listener.orders) >= 1)
    assert (listener.num_drains, broker.reports[0]) == (0, None)
    broker.drained = True
    await until(lambda: broker.reports[-1] is not None)
    num_reports = len(broker.reports)
    await until(lambda: len(broker.reports) > num_reports + 1)
    assert listener.num_drains == 1, "said once"
    assert broker.reports[-1] == listener.report
    await registration.close()


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_close_ends_right_after_a_drain(turns: int) -> None:
    """Turns of the loop between both: the registration is woken and cancelled at once."""
    broker = FakeBroker()
    broker.ttl_ms = 60_000
    registration = await opened(broker, ttl_ms=60_000)
    await until(lambda: registration.registered)
    await asyncio.sleep(0.1)  # it waits for its next renewal
    registration.drain()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(9):
        await registration.close()
    assert broker.known == {}


async def test_a_drain_ends_with_its_incarnation_and_an_answer_to_the_old_one_counts_no_more() -> (
    None
):
    class Slow(FakeBroker):
        """Answers the first renewal after a drain only when it may, with that drain."""

        def __init__(self) -> None:
            super().__init__()
            self.may_answer = asyncio.Event()
            self.incarnations: list[int] = []

        async def register(self, peer: Peer, **options: Any) -> Lease:
            self.incarnations.append(peer.incarnation)
            lease = await super().register(peer, **options)
            if options["draining"]:
                await self.may_answer.wait()
            return lease

    broker = Slow()
    registration = await opened(broker, ttl_ms=300)
    await until(lambda: registered(registration))
    registration.drain()
    await until(lambda: broker.known == {"a": True})
    registration.undrain()
    broker.may_answer.set()
    await until(lambda: broker.known == {"a": False})
    assert not registration.draining
    assert broker.incarnations[0] == 1 < broker.incarnations[-1]
    await registration.close()
