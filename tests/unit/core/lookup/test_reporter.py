"""The reporter against a model of the service that loses, forgets and refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from lmcache_core.lookup import (
    Holding,
    InstanceReporter,
    LookupClient,
    Outbox,
    ReporterTiming,
    StoreEvent,
)

FAST = ReporterTiming(ttl_ms=300, gather_s=0.0, retry_s=0.01, max_retry_s=0.05, max_pending=8)


class ModelService:
    """Follows `docs/protocols.md`; holds (chunk, tier) pairs of one instance."""

    def __init__(self) -> None:
        self.away = False
        self.lose_next_answer = False
        self.incarnation: int | None = None
        self.ended = False
        self.next_sequence = 0
        self.held: set[tuple[str, str]] = set()
        self.num_event_calls = 0
        self.asked_ttl_ms: int | None = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("away", request=request)
        if request.method == "DELETE":
            self.ended = True
            return httpx.Response(204)
        answer = self._lease(request) if request.method == "PUT" else self._events(request)
        if self.lose_next_answer:
            self.lose_next_answer = False
            raise httpx.ReadTimeout("lost", request=request)
        return httpx.Response(200, json=answer)

    def forget(self) -> None:
        self.incarnation, self.next_sequence, self.held = None, 0, set()

    def _lease(self, request: httpx.Request) -> dict[str, object]:
        body = json.loads(request.content)
        if self.incarnation is not None and body["incarnation"] < self.incarnation:
            return {"ttl_ms": body["ttl_ms"], "next_sequence": 0, "resync": True}
        if body["incarnation"] != self.incarnation:
            self.incarnation, self.next_sequence, self.held = body["incarnation"], 0, set()
        self.asked_ttl_ms = body["ttl_ms"]
        return {
            "ttl_ms": body["ttl_ms"] or 300,
            "next_sequence": self.next_sequence,
            "resync": False,
        }

    def _events(self, request: httpx.Request) -> dict[str, object]:
        self.num_event_calls += 1
        body = msgspec.msgpack.decode(request.content)
        if body["incarnation"] != self.incarnation or body["first_sequence"] > self.next_sequence:
            return {"next_sequence": self.next_sequence, "resync": True}
        for op, chunk_id, tier, *_ in body["events"][self.next_sequence - body["first_sequence"] :]:
            pair = (chunk_id.hex(), tier)
            self.held.add(pair) if op == "store" else self.held.discard(pair)
            self.next_sequence += 1
        return {"next_sequence": self.next_sequence, "resync": False}


class Instance:
    """What the reporter reports about: a set of chunks."""

    def __init__(self, service: ModelService) -> None:
        self.client = LookupClient(
            "http://lookup", timeout_s=30.0, transport=httpx.MockTransport(service)
        )
        self.held: dict[tuple[bytes, str], int] = {}
        self.reporter = InstanceReporter(self.client, "pod-1", "sidecar", self.snapshot, FAST)

    def snapshot(self) -> list[Holding]:
        return [Holding(chunk_id, tier, size) for (chunk_id, tier), size in list(self.held.items())]

    def store(self, number: int) -> None:
        chunk_id = number.to_bytes(16, "big")
        self.held[chunk_id, "hot"] = number
        self.reporter.stored(chunk_id, "hot", number)

    def remove(self, number: int) -> None:
        chunk_id = number.to_bytes(16, "big")
        self.held.pop((chunk_id, "hot"), None)
        self.reporter.removed(chunk_id, "hot")

    def agrees_with(self, service: ModelService) -> bool:
        return (
            self.reporter.synced
            and {(chunk_id.hex(), tier) for chunk_id, tier in self.held} == service.held
        )


@asynccontextmanager
async def running(service: ModelService) -> AsyncIterator[Instance]:
    instance = Instance(service)
    await instance.client.open()
    await instance.reporter.open()
    try:
        yield instance
    finally:
        await instance.reporter.close()
        await instance.client.close()


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_without_a_wish_the_lease_is_the_services_default() -> None:
    service = ModelService()
    async with running(service) as instance:
        reporter = InstanceReporter(instance.client, "pod-2", "sidecar", list)
        await reporter.open()
        await eventually(lambda: service.asked_ttl_ms is None)
        await eventually(lambda: reporter.registered)
        await reporter.close()


async def test_a_service_that_is_away_is_one_line_that_names_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lmcache_core.lookup")
    service = ModelService()
    service.away = True
    async with running(service) as instance:
        await eventually(lambda: len(caplog.records) == 1)
        service.away = False
        await eventually(lambda: instance.reporter.registered)
    away, here = (record.getMessage() for record in caplog.records)
    assert away.startswith("lookup unavailable: instance=pod-1 error=lookup http://lookup")
    assert here == "lookup lease granted: instance=pod-1 ttl_ms=300"


async def test_announces_then_follows() -> None:
    service = ModelService()
    async with running(service) as instance:
        for number in range(5):
            instance.store(number)
        await eventually(lambda: instance.agrees_with(service))
        instance.remove(3)
        await eventually(lambda: instance.agrees_with(service))
        assert len(service.held) == 4
    assert service.ended


async def test_a_lost_answer_is_not_a_lost_event() -> None:
    service = ModelService()
    async with running(service) as instance:
        await eventually(lambda: instance.agrees_with(service))
        service.lose_next_answer = True
        instance.store(1)
        await eventually(lambda: instance.agrees_with(service))
        assert instance.reporter.stats["num_resyncs"] == 1


async def test_a_service_that_is_away_costs_nothing_and_is_caught_up_with() -> None:
    service = ModelService()
    service.away = True
    async with running(service) as instance:
        for number in range(5):
            instance.store(number)
        await asyncio.sleep(0.05)
        assert not instance.reporter.registered
        service.away = False
        await eventually(lambda: instance.agrees_with(service))


async def test_too_many_waiting_events_become_one_resync() -> None:
    service = ModelService()
    async with running(service) as instance:
        await eventually(lambda: instance.agrees_with(service))
        service.away = True
        for number in range(20):
            instance.store(number)
        assert instance.reporter.stats["num_overflows"] == 1
        service.away = False
        await eventually(lambda: instance.agrees_with(service))
        assert instance.reporter.stats["num_resyncs"] == 2


@pytest.mark.parametrize("busy", [True, False])
async def test_a_service_that_forgot_everything_is_told_again(busy: bool) -> None:
    service = ModelService()
    async with running(service) as instance:
        instance.store(1)
        await eventually(lambda: instance.agrees_with(service))
        service.forget()
        if busy:
            instance.store(2)
        await eventually(lambda: bool(service.held) and instance.agrees_with(service))
        assert instance.reporter.stats["num_resyncs"] == 2


async def test_a_clock_that_went_back_waits_for_the_old_lease_and_does_not_flood() -> None:
    service = ModelService()
    service.incarnation = 1 << 62
    async with running(service) as instance:
        instance.store(1)
        await asyncio.sleep(0.1)
        assert service.num_event_calls == 0
        service.forget()
        await eventually(lambda: instance.agrees_with(service))


async def test_closing_without_a_service_is_quick() -> None:
    service = ModelService()
    service.away = True
    async with running(service):
        await asyncio.sleep(0.02)
    assert not service.ended


async def test_malformed_holdings_are_the_callers_error() -> None:
    instance = Instance(ModelService())
    with pytest.raises(ValueError, match="16 bytes"):
        instance.reporter.stored(b"short", "hot", 1)
    with pytest.raises(ValueError, match="tier"):
        instance.reporter.removed(b"c" * 16, "a tier")


async def test_a_snapshot_holds_the_loop_up_by_nothing_and_what_changes_meanwhile_is_told() -> None:
    service = ModelService()
    instance = Instance(service)
    has_begun, go_on = threading.Event(), threading.Event()

    def snapshot() -> list[Holding]:
        held = instance.snapshot()
        has_begun.set()
        assert go_on.wait(10), "the loop has had no turn"
        return held

    instance.reporter = InstanceReporter(instance.client, "pod-1", "sidecar", snapshot, FAST)
    instance.store(1)
    instance.store(2)
    await instance.client.open()
    await instance.reporter.open()
    await eventually(has_begun.is_set)
    instance.remove(1)
    instance.store(3)
    assert not instance.reporter.synced
    go_on.set()
    await eventually(lambda: instance.agrees_with(service))
    assert service.held == {(number.to_bytes(16, "big").hex(), "hot") for number in (2, 3)}
    await instance.reporter.close()
    await instance.client.close()


async def test_everything_is_announced_again_when_asked_for() -> None:
    service = ModelService()
    async with running(service) as instance:
        instance.store(1)
        await eventually(lambda: instance.agrees_with(service))
        instance.held[b"c" * 16, "hot"] = 5
        instance.reporter.announce_again()
        await eventually(lambda: instance.agrees_with(service))
        assert len(service.held) == 2


async def test_a_snapshot_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    service = ModelService()
    instance = Instance(service)
    failures = iter([True])

    def snapshot() -> list[Holding]:
        if next(failures, False):
            raise RuntimeError("busy")
        return []

    reporter = InstanceReporter(instance.client, "pod-1", "sidecar", snapshot, FAST)
    await instance.client.open()
    await reporter.open()
    await eventually(lambda: reporter.synced)
    assert "busy" in caplog.text
    await reporter.close()
    await instance.client.close()


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_close_ends_right_after_an_event(turns: int) -> None:
    """Turns of the loop between both: the reporter is woken and cancelled at once."""
    service = ModelService()
    instance = Instance(service)
    await instance.client.open()
    await instance.reporter.open()
    await eventually(lambda: instance.agrees_with(service))
    await asyncio.sleep(0.01)  # it waits for events
    instance.store(1)
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(9):
        await instance.reporter.close()
    assert service.ended
    await instance.client.close()


@pytest.mark.parametrize("next_sequence", [0, 4, 99])
def test_an_acknowledgement_that_cannot_be_true_loses_everything(next_sequence: int) -> None:
    events = [StoreEvent("store", number.to_bytes(16, "big"), "hot", number) for number in range(5)]
    outbox = Outbox(max_pending=1)
    outbox.begin(1)
    outbox.announce(deque(events[:4]))
    outbox.add(events[4])
    assert outbox.num_unacknowledged == 5, "the announcement does not count towards the bound"
    assert outbox.batch(3) == outbox.batch(3) == (0, events[:3])
    outbox.acknowledge(1)
    outbox.acknowledge(next_sequence)
    assert (outbox.needs_resync, outbox.num_unacknowledged) == (True, 0)


def test_an_acknowledgement_of_what_was_lost_meanwhile_changes_nothing() -> None:
    outbox = Outbox(max_pending=2)
    outbox.begin(1)
    events = [StoreEvent("store", number.to_bytes(16, "big"), "hot", number) for number in range(3)]
    for event in events[:2]:
        outbox.add(event)
    assert outbox.batch(8) == (0, events[:2])
    outbox.add(events[2])
    assert outbox.needs_resync, "one event too many while the batch is under way"
    outbox.acknowledge(2)
    assert (outbox.needs_resync, outbox.num_unacknowledged) == (True, 0)
