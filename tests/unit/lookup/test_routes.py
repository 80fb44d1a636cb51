"""The REST API over the embedded index, and without an index."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import APIRouter, Depends, Request, Response
from lmcache_core.lookup import MAX_CHUNKS_PER_LOOKUP, MAX_EVENTS_PER_BATCH
from lmcache_core.lookup.messages import MSGPACK
from lmcache_core.names import KNOWN_TIERS
from lmcache_lookup.app import create_app
from lmcache_lookup.index import LookupIndex
from lmcache_lookup.routes import DirectRoute, Service
from lmcache_lookup.settings import LookupSettings
from lmcache_servicekit.auth import ClientPrincipal

from tests.fixtures.lookup_index import AwayIndex
from tests.fixtures.sample_service import asgi_client

ID = "0a" * 16
EVENTS: dict[str, Any] = {"instance": "a", "incarnation": 1, "first_sequence": 0, "events": []}


@asynccontextmanager
async def serving(
    index: LookupIndex | None = None, token: str | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(create_app(LookupSettings(**options), index), token) as client:
        yield client


async def lease(client: httpx.AsyncClient, instance: str = "a", **fields: Any) -> httpx.Response:
    return await client.put(
        f"/v1/instances/{instance}", json={"incarnation": 1, "kind": "sidecar", **fields}
    )


async def store(
    client: httpx.AsyncClient, *ids: str, first: int = 0, instance: str = "a"
) -> httpx.Response:
    events = [["store", bytes.fromhex(text), "hot", 1] for text in ids]
    return await report(client, instance=instance, first_sequence=first, events=events)


async def report(client: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    body = msgspec.msgpack.encode(EVENTS | changes)
    return await client.post("/v1/events", content=body, headers={"content-type": MSGPACK})


def acknowledged(reply: httpx.Response) -> Any:
    return msgspec.msgpack.decode(reply.content)


async def test_a_lookup_is_answered_as_documented() -> None:
    async with serving() as client:
        assert (await lease(client)).json() == {
            "ttl_ms": 15_000,
            "next_sequence": 0,
            "resync": False,
        }
        for asked_ms, granted_ms in ((1, 1_000), (20_000, 20_000), (1 << 40, 300_000)):
            assert (await lease(client, ttl_ms=asked_ms)).json()["ttl_ms"] == granted_ms
        assert acknowledged(await store(client, ID)) == {"next_sequence": 1, "resync": False}
        question = {"chunk_ids": [ID, "0b" * 16], "a field of a newer client": True}
        answer = await client.post("/v1/lookup", json=question)
        assert answer.json() == {
            "num_prefix": 1,
            "holders": [[{"instance": "a", "kind": "sidecar", "tier": "hot", "size_bytes": 1}]],
            "degraded": False,
        }
        assert (await client.post("/v1/route", json={"chunk_ids": [ID]})).json() == {
            "instances": [{"instance": "a", "num_prefix": 1}],
            "degraded": False,
        }


async def test_instances_are_listed_and_ended() -> None:
    async with serving() as client:
        await lease(client)
        [entry] = (await client.get("/v1/instances")).json()["instances"]
        assert entry.pop("expires_in_ms") > 0
        assert entry == {"instance": "a", "kind": "sidecar", "incarnation": 1, "next_sequence": 0}
        for incarnation, num_left in ((2, 1), (1, 0), (1, 0)):
            ended = await client.delete("/v1/instances/a", params={"incarnation": incarnation})
            assert ended.status_code == 204
            assert len((await client.get("/v1/instances")).json()["instances"]) == num_left


async def test_unknown_tiers_are_refused_in_a_sentence() -> None:
    """Each would take room in the index for each chunk."""
    async with serving() as client:
        await lease(client)
        for op in ("store", "remove"):
            events = [[op, bytes(16), tier] for tier in ("memory", "t1", "tier-63")]
            response = await report(client, events=events)
            assert response.status_code == 422
            [error] = response.json()["errors"]
            assert error["at"] == "body.events"
            assert error["message"].startswith("a tier's name must be one of Hot, LocalDiskBackend")
        assert (await client.get("/v1/stats")).json()["num_chunks"] == 0
        for first, tier in enumerate(sorted(KNOWN_TIERS)):
            events = [["store", bytes(16), tier]]
            reply = await report(client, first_sequence=first, events=events)
            assert reply.status_code == 200


async def test_chunks_that_a_full_index_drops_are_counted() -> None:
    async with serving(max_chunks=2) as client:
        await lease(client)
        await store(client, *(f"{number:032x}" for number in range(5)))
        assert "lmcache_lookup_dropped_chunks_total 3.0" in (await client.get("/metrics")).text


async def test_the_largest_requests_fit() -> None:
    async with serving() as client:
        await lease(client)
        ids = [f"{number:032x}" for number in range(MAX_CHUNKS_PER_LOOKUP)]
        for first in range(0, MAX_CHUNKS_PER_LOOKUP, MAX_EVENTS_PER_BATCH):
            assert acknowledged(
                await store(client, *ids[first : first + MAX_EVENTS_PER_BATCH], first=first)
            ) == {"next_sequence": first + MAX_EVENTS_PER_BATCH, "resync": False}
        answer = (
            await client.post("/v1/lookup", json={"chunk_ids": ids, "exclude": ["b"] * 1024})
        ).json()
        assert answer["num_prefix"] == MAX_CHUNKS_PER_LOOKUP


async def test_without_the_index_questions_are_answered_and_writes_refused() -> None:
    async with serving(AwayIndex()) as client:
        answer = await client.post("/v1/lookup", json={"chunk_ids": [ID]})
        assert (answer.status_code, answer.json()) == (
            200,
            {"num_prefix": 0, "holders": [], "degraded": True},
        )
        for call, nothing in (
            (client.post("/v1/route", json={"chunk_ids": [ID]}), {"instances": []}),
            (client.post("/v1/contains", json={"chunk_ids": [ID]}), {"present": [False]}),
            (client.get(f"/v1/chunks/{ID}/locations"), {"holders": []}),
        ):
            answer = await call
            assert (answer.status_code, answer.json()) == (200, {**nothing, "degraded": True})
        assert (await client.get("/v1/stats")).json() == {
            "index": "away",
            "degraded": True,
            "num_chunks": None,
            "num_instances": None,
        }
        for response in (
            await lease(client),
            await store(client, ID),
            await client.get("/v1/instances"),
            await client.get("/v1/admin/tenants"),
            await client.post("/v1/admin/clear"),
        ):
            assert response.status_code == 503
            assert response.json()["type"] == "urn:lmcache:problem:unavailable"
            assert "away" not in response.text
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["index"]["ok"]) == (200, False)
        assert ready.json()["status"] == "degraded"
        assert (await client.get("/healthz")).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert "lmcache_lookup_degraded_answers_total 4.0" in metrics


async def test_hits_and_events_are_counted() -> None:
    async with serving() as client:
        await lease(client)
        await store(client, ID)
        await store(client, ID, first=7)
        await client.post("/v1/lookup", json={"chunk_ids": [ID, "0b" * 16]})
        metrics = (await client.get("/metrics")).text
    for line in (
        "found_chunks_total 1.0",
        "requested_chunks_total 2.0",
        "events_total 1.0",
        "resyncs_total 1.0",
    ):
        assert f"lmcache_lookup_{line}" in metrics


def test_a_direct_route_refuses_what_it_would_not_run() -> None:
    router = APIRouter(route_class=DirectRoute)

    async def check() -> None: ...

    async def plain(request: Request, caller: ClientPrincipal, service: Service) -> Response:
        return Response()

    async def more(
        request: Request, caller: ClientPrincipal, service: Service, other: Service
    ) -> Response:
        return Response()

    async def queried(
        request: Request, caller: ClientPrincipal, service: Service, limit: int = 1
    ) -> Response:
        return Response()

    router.get("/plain")(plain)
    for endpoint, options in (
        (plain, {"dependencies": [Depends(check)]}),
        (more, {}),
        (queried, {}),
    ):
        with pytest.raises(TypeError, match="make it a GuardedRoute"):
            router.get("/other", **options)(endpoint)
    with pytest.raises(TypeError, match="make it a GuardedRoute"):
        APIRouter(route_class=DirectRoute, dependencies=[Depends(check)]).get("/other")(plain)
