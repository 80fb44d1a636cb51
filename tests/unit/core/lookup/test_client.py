"""The client believes nothing that the service says before it is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.lookup import (
    MAX_CHUNKS_PER_LOOKUP,
    ContainsAnswer,
    Holder,
    LocationsAnswer,
    LookupAnswer,
    LookupClient,
    RouteEntry,
    StoreEvent,
)
from lmcache_core.lookup.messages import MSGPACK, PackedChunksRequest

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
HOLDER = {"instance": "pod-1", "kind": "sidecar", "tier": "hot", "size_bytes": 7}


async def ask(answer: Any, call: Callable[[LookupClient], Any]) -> tuple[Any, httpx.Request]:
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
    runs = [[2, [["pod-1", "sidecar", "hot", 7]]]]
    answer, request = await ask(
        {"num_prefix": 2, "runs": runs}, lambda c: c.lookup([A, B, C], ["me"])
    )
    assert answer == LookupAnswer(2, [[Holder("pod-1", "sidecar", "hot", 7)]] * 2)
    assert msgspec.msgpack.decode(request.content) == {"chunk_ids": A + B + C, "exclude": ["me"]}
    assert request.headers["authorization"] == "Bearer secret-token"
    assert request.headers["content-type"] == MSGPACK


async def test_contains_and_locations() -> None:
    answer, request = await ask({"present": [True, False]}, lambda c: c.contains([A, B]))
    assert (answer, request.url.path) == (ContainsAnswer([True, False]), "/v1/contains")
    with pytest.raises(UnavailableError, match="does not fit"):
        await ask({"present": [True]}, lambda c: c.contains([A, B]))
    with pytest.raises(ValueError, match="ask in parts"):
        await ask({}, lambda c: c.contains([A] * (MAX_CHUNKS_PER_LOOKUP + 1)))
    found, request = await ask({"holders": [HOLDER]}, lambda c: c.locations(A))
    assert found == LocationsAnswer([Holder("pod-1", "sidecar", "hot", 7)])
    assert (request.method, request.url.path) == ("GET", f"/v1/chunks/{A.hex()}/locations")


async def test_an_unknown_field_of_a_newer_service_is_ignored() -> None:
    answer, _ = await ask({"num_prefix": 0, "runs": [], "new": 1}, lambda c: c.lookup([A]))
    assert answer.num_prefix == 0


async def test_nothing_is_asked_about_nothing() -> None:
    client = LookupClient("http://lookup:8081")
    assert await client.lookup([]) == LookupAnswer(0, [])
    assert (await client.route([])).instances == []


@pytest.mark.parametrize(
    "answer",
    [
        {"num_prefix": 3, "runs": [[3, [["x", "sidecar", "hot", 1]]]]},
        {"num_prefix": 2, "runs": [[1, [["x", "sidecar", "hot", 1]]]]},
        {"num_prefix": 0, "runs": [[1 << 40, [["x", "sidecar", "hot", 1]]]]},
        {"num_prefix": 1, "runs": [[1, []]]},
        {"num_prefix": 1, "runs": [[1, [["x", "sidecar", "hot", 1]] * 17]]},
        {"num_prefix": -1, "runs": []},
        {"num_prefix": 1, "runs": [[1, [["../etc", "sidecar", "hot", 1]]]]},
        {"num_prefix": 1, "runs": [[1, [["x", "sidecar", "hot", -1]]]]},
        {"num_prefix": 1, "runs": [[1, [["x", "sidecar", "a b", 1]]]]},
        {"num_prefix": 1, "runs": [[1, [["me", "sidecar", "hot", 1]]]]},
        [],
        httpx.Response(200, content=b"\x91" * 100_000),
        httpx.Response(200, content=b"{"),
        httpx.Response(500, json={"title": "The service failed"}),
        httpx.Response(200, content=b"x", headers={"content-encoding": "br"}),
        httpx.Response(302, headers={"location": "http://elsewhere/"}),
    ],
)
async def test_an_answer_that_makes_no_sense_is_unavailability(answer: Any) -> None:
    with pytest.raises(UnavailableError):
        await ask(answer, lambda c: c.lookup([A, B], ["me"]))


async def test_route() -> None:
    answer, _ = await ask(
        {"instances": [{"instance": "x", "num_prefix": 2}]}, lambda c: c.route([A, B])
    )
    assert answer.instances == [RouteEntry("x", 2)]
    with pytest.raises(UnavailableError):
        await ask({"instances": [{"instance": "x", "num_prefix": 3}]}, lambda c: c.route([A, B]))


async def test_route_to_an_excluded_instance_is_not_followed() -> None:
    entries = [{"instance": "me", "num_prefix": 2}, {"instance": "x", "num_prefix": 1}]
    with pytest.raises(UnavailableError, match="excluded"):
        await ask({"instances": entries}, lambda c: c.route([A, B], ["me"]))


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


async def test_ending_a_lease_that_is_gone_is_fine() -> None:
    _, request = await ask(
        httpx.Response(404, json={}), lambda c: c.end_instance("pod-1", incarnation=3)
    )
    assert (request.method, str(request.url)) == (
        "DELETE",
        "http://lookup:8081/v1/instances/pod-1?incarnation=3",
    )


async def test_a_refusal_is_quoted_without_secrets() -> None:
    with pytest.raises(UnavailableError, match="status 401 'unknown'") as caught:
        await ask(httpx.Response(401, json={"detail": "unknown"}), lambda c: c.lookup([A]))
    assert "secret-token" not in str(caught.value)


async def test_a_closed_client_and_a_dead_server_are_unavailability() -> None:
    with pytest.raises(UnavailableError, match="not open"):
        await LookupClient("http://lookup:8081").lookup([A])
    client = LookupClient("http://127.0.0.1:9", timeout_s=0.5)
    await client.open()
    with pytest.raises(UnavailableError):
        await client.lookup([A])
    await client.close()


@pytest.mark.parametrize(
    "url",
    ["lookup:8081", "ftp://lookup", "http://user:pw@lookup:1", "http://lookup/?q=1", "http://"],
)
def test_a_wrong_url_is_a_config_error_that_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LookupClient(url)
    assert "pw" not in str(caught.value)


async def test_a_malformed_chunk_id_is_the_callers_error() -> None:
    client = LookupClient("http://lookup:8081")
    with pytest.raises(ValueError, match="16 bytes"):
        await client.lookup([b"short"])


def test_packed_ids_are_whole() -> None:
    body = msgspec.msgpack.encode({"chunk_ids": b"x" * 17})
    with pytest.raises(msgspec.ValidationError, match="17 bytes are not a list of chunk ids"):
        msgspec.msgpack.decode(body, type=PackedChunksRequest)
