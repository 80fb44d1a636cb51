"""The REST surface, in process."""

import base64
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_broker.app import create_app
from lmcache_broker.settings import BrokerSettings
from lmcache_core.security import TicketVerifier
from pydantic import SecretStr

from tests.fixtures.broker import bearer, write_tokens
from tests.fixtures.sample_service import asgi_client

KEY = base64.b64encode(b"k" * 32).decode()
CHUNK = "0123456789abcdef" * 2
BODY = {"incarnation": 1, "distributed_url": "lm://10.0.0.1:65433"}


def serve(**options: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    keys = SecretStr(f"k1:{KEY}")
    return asgi_client(
        create_app(BrokerSettings(ticket_keys=keys, max_peers_per_tenant=3, **options))
    )


@pytest.fixture
async def rest() -> AsyncIterator[httpx.AsyncClient]:
    async with serve() as client:
        yield client


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(auth_tokens_file=write_tokens(tmp_path / "tokens.yaml")) as client:
        yield client


def wants(*chunks: Any, **options: Any) -> dict[str, Any]:
    return {"requester": "me", "chunks": list(chunks), **options}


def assert_problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    return body


async def test_the_life_of_a_peer(rest: httpx.AsyncClient) -> None:
    first = await rest.put("/v1/peers/a", json=BODY)
    assert (first.status_code, first.json()) == (
        200,
        {"ttl_ms": 15_000, "draining": False, "copies": []},
    )
    shown = (await rest.get("/v1/peers/a")).json()
    assert 14_000 < shown.pop("expires_in_ms") <= 15_000
    assert shown == BODY | {
        "id": "a",
        "kind": "sidecar",
        "zone": "",
        "node": "",
        "load": 0.0,
        "draining": False,
        "num_pulls": 0,
        "drain": None,
    }
    assert [peer["id"] for peer in (await rest.get("/v1/peers")).json()["peers"]] == ["a"]
    drained = await rest.post("/v1/admin/peers/a:drain")
    assert (drained.status_code, drained.json()["draining"]) == (200, True)
    assert (await rest.put("/v1/peers/a", json=BODY | {"ttl_ms": 3_600_000})).json() == {
        "ttl_ms": 60_000,
        "draining": True,
        "copies": [],
    }
    assert (await rest.delete("/v1/peers/a")).status_code == 204
    assert (await rest.delete("/v1/peers/a")).status_code == 204
    assert_problem(await rest.get("/v1/peers/a"), 404)
    assert_problem(await rest.post("/v1/admin/peers/a:drain"), 404)


async def test_transfers_are_counted(rest: httpx.AsyncClient) -> None:
    await rest.put("/v1/peers/a", json=BODY)
    other = "f" * 32
    asked = wants(
        {"chunk_id": CHUNK, "holders": ["a", "gone"]}, {"chunk_id": other, "holders": ["me"]}
    )
    answer = (await rest.post("/v1/transfers", json=asked)).json()
    assert answer["unassigned"] == [other]
    [pull] = answer["assignments"]
    ticket = TicketVerifier({"k1": b"k" * 32}, "a").verify(pull["ticket"])
    assert (ticket.requester, ticket.expires_unix_ms) == ("me", pull["expires_ms"])
    assert (await rest.get("/v1/stats")).json() == {
        "num_peers": 1,
        "num_draining": 0,
        "num_pulls": 1,
        "max_pulls_per_peer": 64,
        "num_waiting": 0,
        "is_shared": False,
    }
    metrics = (await rest.get("/metrics")).text
    for name in (
        *("peers", "pulls_in_flight", "pulls_total"),
        *("assigned_chunks_total", "unassigned_chunks_total"),
    ):
        assert f"\nlmcache_broker_{name} 1.0\n" in metrics


async def test_fields_of_a_newer_peer_are_ignored(rest: httpx.AsyncClient) -> None:
    tier = {"name": "t", "num_chunks": 0, "used_bytes": 0, "capacity_bytes": 0, "wear": 1}
    newer = {"rack": "r7", "figures": {"watts": 3, "tiers": [tier]}}
    assert (await rest.put("/v1/peers/a", json=BODY | newer)).status_code == 200


@pytest.mark.parametrize(
    "changed",
    [
        {"incarnation": 1.5},
        {"distributed_url": "lm://user:secret@10.0.0.1:1"},
        {"distributed_url": "http://10.0.0.1:1"},
        {"kind": "toaster"},
        {"zone": "<script>"},
        {"load": 1.1},
        {"ttl_ms": 99},
    ],
)
async def test_bad_announcements(rest: httpx.AsyncClient, changed: dict[str, Any]) -> None:
    body = assert_problem(await rest.put("/v1/peers/a", json=BODY | changed), 422)
    assert "secret" not in str(body)
    assert (await rest.get("/v1/peers")).json() == {"peers": []}


@pytest.mark.parametrize("name", ["a b", "%2e%2e", "a" * 129])
async def test_bad_peer_ids(rest: httpx.AsyncClient, name: str) -> None:
    assert_problem(await rest.put(f"/v1/peers/{name}", json=BODY), 422)


@pytest.mark.parametrize(
    ("content", "status"), [(b"[]", 422), (b"{", 400), (b"[" * 60_000, 400), (b" " * 70_000, 413)]
)
async def test_bodies_that_are_no_announcement(
    rest: httpx.AsyncClient, content: bytes, status: int
) -> None:
    headers = {"content-type": "application/json"}
    assert_problem(await rest.put("/v1/peers/a", content=content, headers=headers), status)


async def test_the_longest_request_of_the_protocol_fits(rest: httpx.AsyncClient) -> None:
    holders = [f"{'h' * 126}{i:02d}" for i in range(16)]
    body = {
        "requester": "me",
        "chunks": [{"chunk_id": f"{i:032x}", "holders": holders} for i in range(4096)],
    }
    answer = await rest.post("/v1/transfers", json=body)
    assert (answer.status_code, len(answer.json()["unassigned"])) == (200, 4096)


@pytest.mark.parametrize(
    "body",
    [
        {"chunks": []},
        wants(requester="../x"),
        wants({"chunk_id": CHUNK.upper(), "holders": []}),
        wants({"chunk_id": CHUNK, "holders": ["a"] * 17}),
        wants({"chunk_id": CHUNK, "holders": ["a", "b"], "tiers": ["memory"]}),
        wants(wait_ms=10_001),
        wants(*[{"chunk_id": CHUNK, "holders": []}] * 2),
        wants(*({"chunk_id": f"{i:032x}", "holders": []} for i in range(4097))),
    ],
)
async def test_bad_transfers(rest: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert_problem(await rest.post("/v1/transfers", json=body), 422)


async def test_only_its_requester_ends_a_pull(guarded: httpx.AsyncClient) -> None:
    await guarded.put("/v1/peers/all", json=BODY, headers=bearer("operator"))
    asked = {
        "requester": "me",
        "chunks": [{"chunk_id": CHUNK, "holders": ["all"], "tiers": ["memory"]}],
        "wait_ms": 10,
    }
    (pull,) = (await guarded.post("/v1/transfers", json=asked, headers=bearer("acme"))).json()[
        "assignments"
    ]
    for name, requester, num_ended in (
        ("rival", "me", 0),
        ("acme", "you", 0),
        ("acme", "me", 1),
        ("acme", "me", 0),
    ):
        done = {"requester": requester, "pulls": [pull["pull"]]}
        assert (
            await guarded.post("/v1/transfers:done", json=done, headers=bearer(name))
        ).json() == {"num_ended": num_ended}
    assert (await guarded.get("/v1/stats", headers=bearer("acme"))).json()["num_pulls"] == 0


@pytest.mark.parametrize(
    ("caller", "host", "status"),
    [
        ("10.0.0.9", "127.0.0.1", 400),
        ("10.0.0.9", "localhost.", 400),
        ("10.0.0.9", "127.8.8.8", 400),
        ("10.0.0.9", "localhost.example", 200),
        ("::ffff:127.0.0.1", "127.0.0.1", 200),
        ("10.0.0.9", "sidecar.example", 200),
        ("::1", "localhost", 200),
    ],
)
async def test_a_peer_elsewhere_is_not_at_the_loopback_address(
    caller: str, host: str, status: int
) -> None:
    app = create_app(BrokerSettings(ticket_keys=SecretStr(f"k1:{KEY}")))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(caller, 1234))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://broker") as rest,
    ):
        answer = await rest.put(
            "/v1/peers/a", json={"incarnation": 1, "distributed_url": f"lm://{host}:65433"}
        )
        assert answer.status_code == status, answer.text
