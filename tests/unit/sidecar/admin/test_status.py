"""Status, clients, clear, drain and roles over REST."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lmcache_sidecar.app import create_app
from lmcache_sidecar.socket.server import SocketServer

from tests.fixtures.sample_service import ADMIN_TOKEN, CLIENT_TOKEN, write_tokens
from tests.fixtures.sidecar_app import (
    ARENA_BYTES,
    describe,
    hash_of,
    key_of,
    make_settings,
    serving,
    store,
)

KEYS = [key_of(hash_of(i)) for i in range(3)]
DISK = {"disk_gb": 0.01}


async def test_the_status_tells_what_there_is(tmp_path: Path) -> None:
    async with serving(tmp_path, verify_hot="sampled", accept_handover=True) as (client, parts):
        await store(parts, *KEYS)
        body = (await client.get("/v1/status")).json()
        assert body["instance"] == "test"
        assert body["version"] == "0.1.0"
        assert 0 <= body["uptime_s"] < 60
        assert (body["arena_bytes"], body["verify_hot"]) == (ARENA_BYTES, "sampled")
        assert (
            body["pending_bytes"],
            body["reserved_bytes"],
            body["held_bytes"],
            body["pinned_bytes"],
        ) == (0, 0, 0, 0)
        assert (body["draining"], body["accepts_handover"]) == (False, True)
        assert body["registered"] is None, "there is nobody to register at"
        assert body["drain"] == {
            "state": "serving",
            "total": 0,
            "handed_over": 0,
            "already_elsewhere": 0,
            "failed": 0,
            "left": 0,
        }


async def test_a_drain_is_told_while_it_runs_and_after(tmp_path: Path) -> None:
    async with serving(tmp_path, remote_url=f"file://{tmp_path}/nowhere", accept_handover=True) as (
        client,
        parts,
    ):
        await store(parts, *KEYS)
        begun = (await client.post("/v1/admin/drain?wait=false")).json()
        assert begun["draining"]
        assert (begun["drain"]["state"], begun["drain"]["left"]) == ("writing", len(KEYS))
        assert (await client.get("/v1/status")).json()["draining"]
        ended = (await client.post("/v1/admin/drain")).json()
        assert ended["settled"]
        assert (ended["drain"]["state"], ended["drain"]["total"], ended["drain"]["left"]) == (
            "done",
            len(KEYS),
            len(KEYS),
        )
        status = (await client.get("/v1/status")).json()
        assert (status["drain"], status["accepts_handover"]) == (ended["drain"], False)
        again = (await client.post("/v1/admin/undrain")).json()
        assert (again["draining"], again["drain"]["state"]) == (False, "serving")
        status = (await client.get("/v1/status")).json()
        assert (status["draining"], status["accepts_handover"]) == (False, True)
        parts.descriptions.note(describe())
        pinned = await client.post("/v1/admin/pin", json={"chunk_hashes": [hash_of(0)]})
        assert pinned.json()["num_pinned"] == 1
        metrics = (await client.get("/metrics")).text
        assert f'lmcache_sidecar_drained_chunks_total{{outcome="left"}} {len(KEYS)}.0' in metrics


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (None, (0, 0)),
        ({}, (0, 0)),
        ({"tiers": ["memory"]}, (0, 3)),
        ({"tiers": ["disk"]}, (3, 0)),
        ({"tiers": ["disk", "memory"]}, (0, 0)),
    ],
)
async def test_clear_names_tiers(
    tmp_path: Path, body: dict[str, object] | None, kept: tuple[int, int]
) -> None:
    async with serving(tmp_path, disk_path=tmp_path / "disk", **DISK) as (client, parts):
        await store(parts, *KEYS)
        await parts.stack.drain(5)
        page = (await client.get("/v1/admin/chunks?limit=2")).json()
        assert (len(page["chunks"]), page["next_offset"]) == (2, 2)
        assert (await client.post("/v1/admin/clear", json=body)).json() == {"num_chunks": len(KEYS)}
        tiers = (await client.get("/v1/tiers")).json()["tiers"]
        assert (tiers["memory"]["num_chunks"], tiers["disk"]["num_chunks"]) == kept


async def test_others_are_not_cleared(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, parts):
        await store(parts, *KEYS)
        for body in ({"tiers": ["storage"]}, {"tiers": []}, {"tier": "memory"}):
            assert (await client.post("/v1/admin/clear", json=body)).status_code == 422
        assert len(parts.stack.hot.held()) == len(KEYS)


ROLES = {
    ("get", "/v1/status"): "client",
    ("get", "/v1/tiers"): "client",
    ("get", "/v1/clients"): "client",
    ("get", "/v1/admin/log-level"): "client",
    ("get", "/v1/admin/chunks"): "admin",
    ("get", "/v1/admin/pins"): "admin",
    ("post", "/v1/admin/explain"): "admin",
    ("post", "/v1/admin/pin"): "admin",
    ("post", "/v1/admin/unpin"): "admin",
    ("post", "/v1/admin/evict"): "admin",
    ("post", "/v1/admin/clear"): "admin",
    ("post", "/v1/admin/drain"): "admin",
    ("post", "/v1/admin/undrain"): "admin",
    ("get", "/v1/admin/lookups"): "admin",
    ("put", "/v1/admin/log-level"): "admin",
}


def test_the_document_names_every_route_and_what_it_answers(tmp_path: Path) -> None:
    paths = create_app(make_settings(tmp_path)).openapi()["paths"]
    routes = {
        (method, path): operation
        for path, methods in paths.items()
        for method, operation in methods.items()
        if "/v1" in path
    }
    assert set(routes) == set(ROLES)
    for route, operation in routes.items():
        assert operation["summary"]
        assert set(operation["responses"]) >= {"200", "401", "403", "422", "429", "default"}
        assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert operation["security"] == [{"HTTPBearer": [ROLES[route]]}]


async def test_roles(tmp_path: Path) -> None:
    async with serving(
        tmp_path, tenant="acme", auth_tokens_file=write_tokens(tmp_path / "tokens.yaml")
    ) as (client, _):
        for (method, path), role in ROLES.items():
            codes = [
                (
                    await client.request(
                        method,
                        path,
                        headers={"authorization": f"Bearer {token}"},
                        json={"num_bytes": "x"},
                    )
                ).status_code
                for token in (CLIENT_TOKEN, ADMIN_TOKEN, "wrong-0123456789abcdef")
            ]
            assert codes[2] == 401, path
            assert (codes[0] == 403) is (role == "admin"), path
            assert codes[1] in (200, 409, 422), path


async def test_clients_tell_their_rank_and_how_they_name_kv(tmp_path: Path) -> None:
    from lmcache_core.sidecar import SidecarConnection
    from lmcache_core.wire import messages as m

    async with serving(tmp_path) as (client, parts):
        assert isinstance(parts.socket_server, SocketServer)
        hello = m.engine_hello(m.EngineInfo("engine", 7, 1, "org/model", "layout", 2), [])
        connection = SidecarConnection(tmp_path / "s.sock", hello, 5.0)
        await asyncio.to_thread(connection.open)
        try:
            await asyncio.to_thread(
                connection.call, describe(world_size=2, groups=("", "window")), m.Ok
            )
            await asyncio.to_thread(connection.call, m.ReserveExtents((1000,)), m.Extents)
            [told] = (await client.get("/v1/clients")).json()["clients"]
            status = (await client.get("/v1/status")).json()
        finally:
            await asyncio.to_thread(connection.close)
        assert (told["client"], told["pid"], told["rank"], told["world_size"], told["model"]) == (
            "engine",
            7,
            1,
            2,
            "org/model",
        )
        assert (
            told["num_reservations"],
            told["reserved_bytes"],
            told["num_pins"],
            told["pinned_bytes"],
        ) == (1, 1024, 0, 0)
        assert told["descriptions"] == [
            {
                "fmt": "vllm",
                "model_name": "org/model",
                "world_size": 2,
                "chunk_size": 4,
                "groups": ["", "window"],
            }
        ], "without the root, which holds the salt"
        assert (status["num_clients"], status["reserved_bytes"]) == (1, 1024)
        assert len(parts.descriptions) == 1


async def test_clients_of_another_tenant_see_nothing_of_this_one(tmp_path: Path) -> None:
    async with serving(
        tmp_path, tenant="rival", auth_tokens_file=write_tokens(tmp_path / "tokens.yaml")
    ) as (client, _):
        for path in ("/v1/status", "/v1/tiers", "/v1/clients", "/v1/admin/log-level"):
            answer = await client.get(path, headers={"authorization": f"Bearer {CLIENT_TOKEN}"})
            assert (answer.status_code, answer.json()["detail"]) == (
                403,
                "this service belongs to another tenant",
            )
        assert (
            await client.get("/v1/status", headers={"authorization": f"Bearer {ADMIN_TOKEN}"})
        ).status_code == 200, "an operator's"
