"""The reporter and a model of the service that loses, forgets and refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator
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
from lmcache_core.lookup.messages import MSGPACK

from tests.fixtures.waiting import until

pytestmark = pytest.mark.virtual_time

TIMING = ReporterTiming(max_pending=8)


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
        if request.headers["accept"] == MSGPACK:
            return httpx.Response(200, content=msgspec.msgpack.encode(answer))
        return httpx.Response(200, json=answer)

    def forget(self) -> None:
        self.incarnation, self.next_sequence, self.held = None, 0, set()

    def _lease(self, request: httpx.Request) -> dict[str, object]:
        body = json.loads(request.content)
        if self.incarnation is not None and body["incarnation"] < self.incarnation:
            return {"ttl_ms": 15_000, "next_sequence": 0, "resync": True}
        if body["incarnation"] != self.incarnation:
            self.incarnation, self.next_sequence, self.held = body["incarnation"], 0, set()
        return {
            "ttl_ms": body["ttl_ms"] or 15_000,
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
        self.reporter = InstanceReporter(
            self.client, "pod-1", "sidecar", lambda: self.snapshot(), TIMING
        )

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
async def running(
    service: ModelService, instance: Instance | None = None
) -> AsyncIterator[Instance]:
    instance = instance or Instance(service)
    await instance.client.open()
    await instance.reporter.open()
    try:
        yield instance
    finally:
        await instance.reporter.close()
        await instance.client.close()


async def test_lost_answer_is_not_a_lost_event() -> None:
    service = ModelService()
    async with running(service) as instance:
        await until(lambda: instance.agrees_with(service))
        service.lose_next_answer = True
        instance.store(1)
        await until(lambda: instance.agrees_with(service))
        assert instance.reporter.stats["num_resyncs"] == 1


async def test_unavailable_service_is_logged_once_and_catches_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lmcache_core.lookup")
    service = ModelService()
    service.away = True
    async with running(service) as instance:
        for number in range(5):
            instance.store(number)
        await asyncio.sleep(600.0)
        assert not instance.reporter.registered
        service.away = False
        await until(lambda: instance.agrees_with(service))
        service.away = True
        await until(lambda: not instance.reporter.registered)
    assert not service.ended
    away, here, away_again = (record.getMessage() for record in caplog.records)
    assert away.startswith("lookup unavailable: instance=pod-1 error=lookup http://lookup")
    assert here == "lookup lease granted: instance=pod-1 ttl_ms=15000", "the service's default"
    assert away_again == away


async def test_too_many_waiting_events_become_one_resync() -> None:
    service = ModelService()
    async with running(service) as instance:
        await until(lambda: instance.agrees_with(service))
        service.away = True
        for number in range(20):
            instance.store(number)
        assert instance.reporter.stats["num_overflows"] == 1
        service.away = False
        await until(lambda: instance.agrees_with(service))
        assert instance.reporter.stats["num_resyncs"] == 2


@pytest.mark.parametrize("busy", [True, False])
async def test_service_that_forgot_everything_gets_it_again(busy: bool) -> None:
    service = ModelService()
    async with running(service) as instance:
        instance.store(1)
        await until(lambda: instance.agrees_with(service))
        service.forget()
        if busy:
            instance.store(2)
        await until(lambda: bool(service.held) and instance.agrees_with(service))
        assert instance.reporter.stats["num_resyncs"] == 2


async def test_reporter_whose_clock_went_back_waits_for_the_end_of_the_old_lease() -> None:
    service = ModelService()
    service.incarnation = 1 << 62
    async with running(service) as instance:
        instance.store(1)
        await asyncio.sleep(60.0)
        assert service.num_event_calls == 0, "no announcement is sent in vain"
        service.forget()
        await until(lambda: instance.agrees_with(service))


async def test_loop_runs_during_a_snapshot_and_changes_meanwhile_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, loop = ModelService(), asyncio.get_running_loop()
    instance, has_changed, were_turns = Instance(service), threading.Event(), list[bool]()
    take = instance.snapshot

    def change() -> None:
        instance.remove(1)
        instance.store(3)
        assert not instance.reporter.synced
        has_changed.set()

    def snapshot() -> list[Holding]:
        held = take()
        loop.call_soon_threadsafe(change)
        were_turns.append(has_changed.wait(60.0))
        return held

    monkeypatch.setattr(instance, "snapshot", snapshot)
    async with running(service, instance):
        instance.store(1)
        instance.store(2)
        await until(lambda: instance.agrees_with(service))
        assert service.held == {(number.to_bytes(16, "big").hex(), "hot") for number in (2, 3)}
    assert were_turns == [True]


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_close_ends_right_after_an_event(turns: int) -> None:
    """Turns of the loop between both: the reporter is woken and cancelled at once."""
    service = ModelService()
    async with running(service) as instance:
        await until(lambda: instance.agrees_with(service))
        await asyncio.sleep(0.01)  # it waits for events
        instance.store(1)
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(3.0):
            await instance.reporter.close()
        assert service.ended


def events_of(count: int) -> list[StoreEvent]:
    return [StoreEvent("store", n.to_bytes(16, "big"), "hot", n) for n in range(count)]


@pytest.mark.parametrize("next_sequence", [0, 4, 99])
def test_impossible_acknowledgement_loses_everything(next_sequence: int) -> None:
    events = events_of(5)
    outbox = Outbox(max_pending=1)
    outbox.begin(1)
    outbox.announce(deque(events[:4]))
    outbox.add(events[4])
    assert outbox.num_unacknowledged == 5, "the announcement does not count towards the bound"
    assert outbox.batch(3) == outbox.batch(3) == (0, events[:3])
    outbox.acknowledge(1)
    outbox.acknowledge(next_sequence)
    assert (outbox.needs_resync, outbox.num_unacknowledged) == (True, 0)


async def test_malformed_holdings_are_the_callers_error() -> None:
    instance = Instance(ModelService())
    with pytest.raises(ValueError, match="16 bytes"):
        instance.reporter.stored(b"short", "hot", 1)
    with pytest.raises(ValueError, match="tier"):
        instance.reporter.removed(b"c" * 16, "a tier")


async def test_everything_is_announced_again_on_request() -> None:
    service = ModelService()
    async with running(service) as instance:
        instance.store(1)
        await until(lambda: instance.agrees_with(service))
        instance.held[b"c" * 16, "hot"] = 5
        instance.reporter.announce_again()
        await until(lambda: instance.agrees_with(service))
        assert len(service.held) == 2


async def test_failed_snapshot_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = ModelService()
    instance, failures = Instance(service), iter([True])

    def snapshot() -> list[Holding]:
        if next(failures, False):
            raise RuntimeError("busy")
        return []

    monkeypatch.setattr(instance, "snapshot", snapshot)
    async with running(service, instance):
        await until(lambda: instance.reporter.synced)
    assert "busy" in caplog.text


def test_acknowledgement_of_lost_events_changes_nothing() -> None:
    events = events_of(3)
    outbox = Outbox(max_pending=2)
    outbox.begin(1)
    for event in events[:2]:
        outbox.add(event)
    assert outbox.batch(8) == (0, events[:2])
    outbox.add(events[2])
    assert outbox.needs_resync, "one event too many while the batch is under way"
    outbox.acknowledge(2)
    assert (outbox.needs_resync, outbox.num_unacknowledged) == (True, 0)
