"""The client checks everything that the service answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import (
    MAX_CHUNKS_PER_LOOKUP,
    ContainsAnswer,
    Holder,
    LookupAnswer,
    LookupClient,
    RouteEntry,
    StoreEvent,
)
from lmcache_core.lookup.messages import MSGPACK, PackedChunksRequest

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
HOLDER = ["pod-1", "sidecar", "hot", 7]


async def ask(answer: Any, call: Callable[[LookupClient], Any]) -> tuple[Any, httpx.Request]:
    """What the client makes of an answer, and the request."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if isinstance(answer, httpx.Response):
            return answer
        if request.headers["accept"] == MSGPACK:
            return httpx.Response(200, content=msgspec.msgpack.encode(answer))
        return httpx.Response(200, json=answer)

    client = LookupClient(
        "http://lookup:8081", "secret-token", transport=httpx.MockTransport(handle)
    )
    await client.open()
    try:
        return await call(client), seen[-1]
    finally:
        await client.close()


async def test_lookup_sends_bytes_and_returns_holders() -> None:
    answer, request = await ask(
        {"num_prefix": 2, "runs": [[2, [HOLDER]]], "from_a_newer_service": 1},
        lambda c: c.lookup([A, B, C], ["me"]),
    )
    assert answer == LookupAnswer(2, [[Holder("pod-1", "sidecar", "hot", 7)]] * 2)
    assert msgspec.msgpack.decode(request.content) == {"chunk_ids": A + B + C, "exclude": ["me"]}
    assert request.headers["authorization"] == "Bearer secret-token"
    assert request.headers["content-type"] == MSGPACK


@pytest.mark.parametrize(
    "answer",
    [
        {"num_prefix": 3, "runs": [[3, [HOLDER]]]},
        {"num_prefix": 2, "runs": [[1, [HOLDER]]]},
        {"num_prefix": 0, "runs": [[1 << 40, [HOLDER]]]},
        {"num_prefix": 1, "runs": [[1, []]]},
        {"num_prefix": 1, "runs": [[1, [HOLDER] * 17]]},
        {"num_prefix": -1, "runs": []},
        {"num_prefix": 1, "runs": [[1, [["../etc", "sidecar", "hot", 1]]]]},
        {"num_prefix": 1, "runs": [[1, [["x", "sidecar", "hot", -1]]]]},
        {"num_prefix": 1, "runs": [[1, [["x", "sidecar", "a b", 1]]]]},
        {"num_prefix": 1, "runs": [[1, [["me", "sidecar", "hot", 1]]]]},
        httpx.Response(200, content=b"\x91" * 100_000),
        httpx.Response(302, headers={"location": "http://elsewhere/"}),
    ],
)
async def test_impossible_answer_counts_as_an_unavailable_service(answer: Any) -> None:
    with pytest.raises(UnavailableError):
        await ask(answer, lambda c: c.lookup([A, B], ["me"]))


async def test_contains() -> None:
    answer, request = await ask({"present": [True, False]}, lambda c: c.contains([A, B]))
    assert (answer, request.url.path) == (ContainsAnswer([True, False]), "/v1/contains")
    with pytest.raises(UnavailableError, match="does not fit"):
        await ask({"present": [True]}, lambda c: c.contains([A, B]))
    with pytest.raises(ValueError, match="ask in parts"):
        await ask({}, lambda c: c.contains([A] * (MAX_CHUNKS_PER_LOOKUP + 1)))


async def test_route_names_no_excluded_instance_and_no_longer_prefix() -> None:
    x, me = {"instance": "x", "num_prefix": 2}, {"instance": "me", "num_prefix": 2}
    answer, _ = await ask({"instances": [x]}, lambda c: c.route([A, B], ["me"]))
    assert answer.instances == [RouteEntry("x", 2)]
    for wrong in (me, x | {"num_prefix": 3}):
        with pytest.raises(UnavailableError):
            await ask({"instances": [wrong]}, lambda c: c.route([A, B], ["me"]))


async def test_lease_and_events() -> None:
    lease = {"ttl_ms": 5, "next_sequence": 0, "resync": False}
    answer, request = await ask(
        lease, lambda c: c.renew_instance("pod-1", incarnation=3, kind="sidecar", ttl_ms=9)
    )
    assert (answer.ttl_ms, request.method, request.url.path) == (5, "PUT", "/v1/instances/pod-1")
    event = StoreEvent("store", A, "hot", 5)
    _, request = await ask(
        {"next_sequence": 1, "resync": False},
        lambda c: c.send_events("pod-1", incarnation=3, first_sequence=0, events=[event]),
    )
    assert msgspec.msgpack.decode(request.content)["events"] == [["store", A, "hot", 5, None]]


async def test_refusal_is_quoted_without_secrets() -> None:
    with pytest.raises(UnavailableError, match="status 401 'unknown'") as caught:
        await ask(httpx.Response(401, json={"detail": "unknown"}), lambda c: c.lookup([A]))
    assert "secret-token" not in str(caught.value)


async def test_malformed_chunk_id_is_the_callers_error() -> None:
    client = LookupClient("http://lookup:8081")
    with pytest.raises(ValueError, match="16 bytes"):
        await client.lookup([b"short"])
    body = msgspec.msgpack.encode({"chunk_ids": b"x" * 17})
    with pytest.raises(msgspec.ValidationError, match="17 bytes are not a list of chunk ids"):
        msgspec.msgpack.decode(body, type=PackedChunksRequest)


async def test_nothing_is_asked_about_no_chunks() -> None:
    client = LookupClient("http://lookup:8081")
    assert await client.lookup([]) == LookupAnswer(0, [])
    assert (await client.route([])).instances == []
    with pytest.raises(UnavailableError, match="not open"):
        await client.lookup([A])
