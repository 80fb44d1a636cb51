"""Which role may call what: every route of every service is in one table, and no token of a client
changes what a storage server is to others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from lmcache_broker.app import create_app as create_broker
from lmcache_broker.settings import BrokerSettings
from lmcache_core.lookup.messages import MAX_INCARNATION, MSGPACK
from lmcache_lookup.app import create_app as create_lookup
from lmcache_lookup.settings import LookupSettings
from lmcache_servicekit.app import ServiceApp
from lmcache_sidecar.app import create_app as create_sidecar
from lmcache_storage.app import create_app as create_storage
from lmcache_storage.settings import StorageSettings
from lmcache_webhook.app import create_app as create_webhook
from lmcache_webhook.settings import WebhookSettings

from tests.fixtures.broker import KEYS
from tests.fixtures.redis_server import running_redis
from tests.fixtures.sidecar_app import make_settings

ANYONE, CLIENT, ADMIN = "anyone", "client", "admin"
PROBES: Final = {"GET /healthz": ANYONE, "GET /readyz": ANYONE, "GET /metrics": ANYONE}
LOG_LEVEL: Final = {"GET /v1/admin/log-level": CLIENT, "PUT /v1/admin/log-level": ADMIN}
DRAIN_AND_PINS: Final = {
    f"{method} /v1/admin/{name}": ADMIN
    for method, name in (
        ("POST", "evict"),
        ("POST", "clear"),
        ("POST", "drain"),
        ("POST", "undrain"),
        ("POST", "pin"),
        ("POST", "unpin"),
        ("GET", "pins"),
    )
}
LEAST_ROLE: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "lookup": {
            **PROBES,
            **LOG_LEVEL,
            "GET /": ANYONE,
            "POST /v1/lookup": CLIENT,
            "POST /v1/route": CLIENT,
            "POST /v1/contains": CLIENT,
            "GET /v1/chunks/{chunk_id}/locations": CLIENT,
            # Another tenant's: admin.
            "GET /v1/stats": CLIENT,
            # As a storage server: storage or admin, whose leases belong to no tenant.
            "PUT /v1/instances/{instance}": CLIENT,
            "DELETE /v1/instances/{instance}": CLIENT,
            "GET /v1/instances": CLIENT,
            # Of another tenant's chunks: storage or admin.
            "POST /v1/events": CLIENT,
            "GET /v1/admin/tenants": ADMIN,
            "POST /v1/admin/evict": ADMIN,
            "POST /v1/admin/clear": ADMIN,
        },
        "broker": {
            **PROBES,
            **LOG_LEVEL,
            # As a storage server: storage or admin, whose peers belong to no tenant.
            "PUT /v1/peers/{peer_id}": CLIENT,
            "DELETE /v1/peers/{peer_id}": CLIENT,
            "GET /v1/peers": CLIENT,
            "GET /v1/peers/{peer_id}": CLIENT,
            "GET /v1/stats": CLIENT,
            "GET /v1/overview": CLIENT,
            "POST /v1/transfers": CLIENT,
            "POST /v1/transfers:renew": CLIENT,
            "POST /v1/transfers:done": CLIENT,
            "POST /v1/peers/{peer_id}:drain": ADMIN,
            "POST /v1/admin/peers/{peer_id}:drain": ADMIN,
        },
        "storage": {
            **PROBES,
            **LOG_LEVEL,
            **DRAIN_AND_PINS,
            "GET /": ANYONE,
            "PUT /v1/chunks/{key}": CLIENT,
            "GET /v1/chunks/{key}": CLIENT,
            "HEAD /v1/chunks/{key}": CLIENT,
            "DELETE /v1/chunks/{key}": CLIENT,
            "POST /v1/chunks:contains": CLIENT,
            "POST /v1/chunks:get": CLIENT,
            "GET /v1/chunks": CLIENT,
            "GET /v1/stats": CLIENT,
        },
        "sidecar": {
            **PROBES,
            **LOG_LEVEL,
            **DRAIN_AND_PINS,
            "GET /": ANYONE,
            "GET /v1/status": CLIENT,
            "GET /v1/tiers": CLIENT,
            "GET /v1/clients": CLIENT,
            "GET /v1/admin/chunks": ADMIN,
            "POST /v1/admin/explain": ADMIN,
            "GET /v1/admin/lookups": ADMIN,
        },
        "webhook": {
            **PROBES,
            "GET /": ANYONE,
            # API servers send no token: the chart allows anonymous calls.
            "POST /mutate": CLIENT,
        },
    }
)
TOKENS: Final = {
    "client": "client-0123456789abcdef",
    "storage": "storage-0123456789abcdef",
    "admin": "admin-0123456789abcdef",
    "rival": "rival-0123456789abcdef",
}
CHUNK: Final = "0a" * 16
STORAGE_URL: Final = "lm://st-0.example:65432"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """One token of each role for the tenant `acme`, and a client of the tenant `rival`."""
    entries = [
        f"- {{name: {name}, tenant: {'rival' if name == 'rival' else 'acme'},"
        f" role: {'client' if name == 'rival' else name}, token: {token}}}"
        for name, token in TOKENS.items()
    ]
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens:\n" + "\n".join(entries))
    return path


def lookup(tokens: Path, **options: Any) -> FastAPI:
    return create_lookup(LookupSettings(auth_tokens_file=tokens, **options))


def broker(tokens: Path, **options: Any) -> FastAPI:
    keys = tokens.with_name("keys")
    keys.write_text(
        "".join(f"{name}:MTExMTExMTExMTExMTExMTExMTExMTExMTExMTExMTE=" for name in KEYS)
    )
    return create_broker(BrokerSettings(auth_tokens_file=tokens, ticket_keys_file=keys, **options))


APPS: Mapping[str, Callable[[Path], FastAPI]] = MappingProxyType(
    {
        "lookup": lookup,
        "broker": broker,
        "storage": lambda tokens: create_storage(
            StorageSettings(
                auth_tokens_file=tokens,
                lm_port=0,
                memory_gb=1 / 256,
                instance_id="storage-0",
                max_record_mb=1,
            )
        ),
        "sidecar": lambda tokens: create_sidecar(
            make_settings(tokens.parent, auth_tokens_file=tokens, tenant="acme")
        ),
        "webhook": lambda tokens: create_webhook(
            WebhookSettings(sidecar_image="s:1", payload_image="p:1", auth_tokens_file=tokens)
        ),
    }
)


@asynccontextmanager
async def callers(app: FastAPI) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    """A client for each token, and one without."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), AsyncExitStack() as stack:
        found = {}
        for name, token in {**TOKENS, "anyone": ""}.items():
            headers = {"authorization": f"Bearer {token}"} if token else {}
            client = httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers)
            found[name] = await stack.enter_async_context(client)
        yield found


@pytest.mark.parametrize("service", LEAST_ROLE)
async def test_every_route_admits_the_roles_of_the_table(service: str, tokens: Path) -> None:
    app = APPS[service](tokens)
    assert isinstance(app, ServiceApp)
    guarded = {f"{method} {route.path}" for route in app.guarded for method in route.methods or ()}
    documented = {
        f"{method.upper()} {path}"
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    }
    table = LEAST_ROLE[service]
    assert guarded | documented == set(table), "a route without a role, or a role without a route"
    assert {name for name, role in table.items() if role != ANYONE} == guarded
    async with callers(app) as by_token:
        for name, least in table.items():
            method, path = name.split()
            # Admitted, it fails at the parameter, so that nothing is done.
            url = path.replace("{", "").replace("}", "") + "?unknown=1"
            statuses = {
                token: (await client.request(method, url)).status_code
                for token, client in by_token.items()
            }
            admitted = {token for token, status in statuses.items() if status not in (401, 403)}
            expected = {
                ANYONE: {*TOKENS, "anyone"},
                # A sidecar belongs to one tenant.
                CLIENT: set(TOKENS) - ({"rival"} if service == "sidecar" else set()),
                ADMIN: {"admin"},
            }[least]
            assert admitted == expected, (name, statuses)


@pytest.fixture(params=["embedded", "redis"])
async def lookup_callers(
    request: pytest.FixtureRequest, tokens: Path
) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    with ExitStack() as stack:
        options = {}
        if request.param == "redis":
            options = {
                "redis_url": stack.enter_context(running_redis()).url,
                "redis_timeout_ms": 5000,
                "redis_write_timeout_ms": 5000,
            }
        async with callers(lookup(tokens, **options)) as by_token:
            yield by_token


async def lease(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"incarnation": 7, "kind": "storage", "ttl_ms": 300_000, **fields}
    return await client.put("/v1/instances/st-0", json=body)


async def report(
    client: httpx.AsyncClient, op: str, incarnation: int, first: int
) -> httpx.Response:
    body = {"instance": "st-0", "incarnation": incarnation, "first_sequence": first}
    events = [[op, bytes.fromhex(CHUNK), "memory", 5, tenant] for tenant in ("acme", "rival")]
    if client.headers["authorization"] == f"Bearer {TOKENS['client']}":
        events = events[:1]
    content = msgspec.msgpack.encode(body | {"events": events})
    return await client.post("/v1/events", content=content, headers={"content-type": MSGPACK})


async def found(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = (await client.get(f"/v1/chunks/{CHUNK}/locations")).json()
    assert not answer["degraded"]
    holders: list[dict[str, Any]] = answer["holders"]
    return holders


HELD = {"instance": "st-0", "kind": "storage", "tier": "memory", "size_bytes": 5}


@pytest.mark.parametrize("incarnation", [0, 7, 8, MAX_INCARNATION])
async def test_clients_lease_with_a_storage_servers_name_changes_nothing_for_others(
    lookup_callers: dict[str, httpx.AsyncClient], incarnation: int
) -> None:
    storage, client, rival = (lookup_callers[name] for name in ("storage", "client", "rival"))
    assert (await lease(storage)).status_code == 200
    acknowledged = await report(storage, "store", 7, 0)
    assert not msgspec.msgpack.decode(acknowledged.content)["resync"]
    for thief in (client, rival):
        assert (await lease(thief, incarnation=incarnation, kind="sidecar")).status_code == 200
        assert (await report(client, "remove", incarnation, 0)).status_code == 200
        assert await found(client) == await found(rival) == [HELD]
        assert (await thief.delete("/v1/instances/st-0")).status_code == 204
    assert await found(client) == await found(rival) == [HELD]
    renewed = (await lease(storage)).json()
    assert (renewed["next_sequence"], renewed["resync"]) == (2, False)
    # The next life of the server.
    assert not (await lease(storage, incarnation=9)).json()["resync"]


async def test_client_is_no_storage_server_for_lookup(
    lookup_callers: dict[str, httpx.AsyncClient],
) -> None:
    for name in ("client", "rival"):
        refused = await lease(lookup_callers[name])
        assert (refused.status_code, refused.json()["type"]) == (
            403,
            "urn:lmcache:problem:forbidden",
        )
        assert "kind=storage: needs a token with the role storage" in refused.json()["detail"]
    refused = await lease(lookup_callers["storage"], kind="sidecar")
    assert refused.status_code == 403
    assert (await lookup_callers["client"].get("/v1/instances")).json() == {"instances": []}
    assert (await lease(lookup_callers["admin"])).status_code == 200
    for name in ("admin", "storage"):
        [entry] = (await lookup_callers[name].get("/v1/instances")).json()["instances"]
        assert (entry["instance"], entry["kind"]) == ("st-0", "storage")
    assert (await lookup_callers["client"].get("/v1/instances")).json() == {"instances": []}


async def register(client: httpx.AsyncClient, url: str, **fields: Any) -> httpx.Response:
    body = {"incarnation": 7, "distributed_url": url, "kind": "storage", **fields}
    return await client.put("/v1/peers/st-0", json=body)


@pytest.mark.parametrize("incarnation", [0, 7, 8, MAX_INCARNATION])
async def test_clients_registration_with_a_storage_servers_name_changes_nothing_for_others(
    tokens: Path, incarnation: int
) -> None:
    async with callers(broker(tokens)) as by_token:
        storage, client, rival = (by_token[name] for name in ("storage", "client", "rival"))
        assert (await register(storage, STORAGE_URL)).status_code == 200
        for thief in (client, rival):
            answer = await register(
                thief, "lm://thief.example:1", incarnation=incarnation, kind="sidecar"
            )
            assert answer.status_code == 200
            refused = await register(thief, "lm://thief.example:1")
            assert (refused.status_code, "kind=storage" in refused.json()["detail"]) == (403, True)
            for asking in (client, rival):
                shown = (await asking.get("/v1/peers/st-0")).json()
                assert (shown["kind"], shown["distributed_url"]) == ("storage", STORAGE_URL)
                body = {
                    "requester": "me",
                    "chunks": [{"chunk_id": CHUNK, "holders": ["st-0"]}],
                }
                [pull] = (await asking.post("/v1/transfers", json=body)).json()["assignments"]
                assert pull["distributed_url"] == STORAGE_URL
            assert (await thief.delete("/v1/peers/st-0")).status_code == 204
            assert (await rival.get("/v1/peers/st-0")).json()["distributed_url"] == STORAGE_URL
        assert (await register(storage, STORAGE_URL)).status_code == 200
        assert (await register(storage, STORAGE_URL, incarnation=9)).status_code == 200
