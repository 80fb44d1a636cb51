"""Client and service may be one version apart: an older service takes JSON only, and one that is
replaced takes MessagePack again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import LookupAnswer, LookupClient, StoreEvent
from lmcache_core.lookup.client import JSON_ONLY_S, FormatChooser
from lmcache_core.lookup.messages import (
    JSON,
    MSGPACK,
    ChunksRequest,
    EventsRequest,
    PackedChunksRequest,
    PackedEventsRequest,
    PackedEvictRequest,
    pack_ids,
    packed_events,
)
from lmcache_core.wire.json_http import JsonHttpClient

A, B = b"a" * 16, b"b" * 16


class OldService:
    """Reads JSON and nothing else; `status` is what it says to the rest."""

    def __init__(self, status: int = 422) -> None:
        self.status = status
        self.seen: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request.headers["content-type"])
        if self.seen[-1] != JSON:
            return httpx.Response(self.status, json={"title": "The request is not valid"})
        if request.url.path == "/v1/events":
            assert msgspec.json.decode(request.content)["events"] == [
                {"op": "store", "chunk_id": A.hex(), "tier": "hot", "size_bytes": 5}
            ]
            return httpx.Response(200, json={"next_sequence": 1, "resync": False})
        assert msgspec.json.decode(request.content) == {"chunk_ids": [A.hex()]}
        return httpx.Response(200, json={"num_prefix": 0, "holders": [], "degraded": False})


@asynccontextmanager
async def client_of(service: OldService) -> AsyncIterator[LookupClient]:
    client = LookupClient("http://lookup", transport=httpx.MockTransport(service))
    await client.open()
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize("status", [400, 415, 422])
async def test_an_older_service_is_spoken_to_in_json(status: int) -> None:
    service = OldService(status)
    async with client_of(service) as client:
        assert await client.lookup([A]) == LookupAnswer(0, [])
        assert await client.lookup([A]) == LookupAnswer(0, [])
        ack = await client.send_events(
            "x", incarnation=1, first_sequence=0, events=[StoreEvent("store", A.hex(), "hot", 5)]
        )
        assert ack.next_sequence == 1
    assert service.seen == [MSGPACK, JSON, JSON, JSON]


@pytest.mark.parametrize("status", [401, 403, 500, 503])
async def test_a_refusal_for_another_reason_is_not_asked_twice(status: int) -> None:
    service = OldService(status)
    async with client_of(service) as client:
        for _ in range(2):
            with pytest.raises(UnavailableError, match=f"status {status}"):
                await client.lookup([A])
    assert service.seen == [MSGPACK, MSGPACK]


async def test_a_service_that_was_replaced_gets_messagepack_again() -> None:
    service, now = OldService(), [0.0]
    http = JsonHttpClient(
        "lookup", "http://lookup", None, 1.0, transport=httpx.MockTransport(service)
    )
    chooser = FormatChooser(http, lambda: now[0])
    packed = PackedChunksRequest(A)
    await http.open()
    for now[0] in (0.0, 1.0, JSON_ONLY_S + 1.5):
        await chooser.ask("POST", "/v1/lookup", packed, lambda: ChunksRequest([A.hex()]))
    await http.close()
    assert service.seen == [MSGPACK, JSON, JSON, MSGPACK, JSON]


async def test_a_wrong_question_does_not_end_messagepack() -> None:
    seen = []

    def refuse(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["content-type"])
        return httpx.Response(422, json={"detail": "nonsense"})

    http = JsonHttpClient(
        "lookup", "http://lookup", None, 1.0, transport=httpx.MockTransport(refuse)
    )
    chooser = FormatChooser(http)
    await http.open()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="nonsense"):
            await chooser.ask(
                "POST", "/v1/lookup", PackedChunksRequest(A), lambda: ChunksRequest([A.hex()])
            )
    await http.close()
    assert seen == [MSGPACK, JSON, MSGPACK, JSON]


def test_both_forms_of_a_body_say_the_same() -> None:
    plain = ChunksRequest([A.hex(), B.hex()], ["x"])
    assert PackedChunksRequest(pack_ids([A, B]), ["x"]).ids == plain.ids == [A, B]
    events = EventsRequest(
        "x",
        1,
        0,
        [StoreEvent("store", A.hex(), "hot", 5, "acme"), StoreEvent("remove", B.hex(), "disk")],
    )
    packed = msgspec.msgpack.decode(
        msgspec.msgpack.encode(packed_events(events)), type=PackedEventsRequest
    )
    assert packed.ids == events.ids == [A, B]
    assert [(one.op, one.tier, one.size_bytes, one.tenant) for one in packed.events] == [
        ("store", "hot", 5, "acme"),
        ("remove", "disk", 0, None),
    ]


@pytest.mark.parametrize("kind", [PackedChunksRequest, PackedEvictRequest])
def test_packed_ids_are_whole(kind: type[msgspec.Struct]) -> None:
    with pytest.raises(msgspec.ValidationError, match="17 bytes are not a list of chunk ids"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"chunk_ids": b"x" * 17}), type=kind)
    with pytest.raises(ValueError, match="16 bytes"):
        pack_ids([b"short"])
