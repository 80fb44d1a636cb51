"""Callers are authenticated before their requests are read, and every route asks for a role."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from fastapi import APIRouter, Depends
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.audit import AUDIT_LOGGER
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute, RoleRequired
from pydantic import BaseModel

from tests.fixtures.sample_service import (
    ADMIN_TOKEN,
    CLIENT_TOKEN,
    SampleSettings,
    asgi_client,
    no_parts,
    write_tokens,
)

JSON = {"content-type": "application/json"}


class Quota(BaseModel):
    """What an admin sets."""

    tenant: str
    num_bytes: int


def settings(tmp_path: Path) -> SampleSettings:
    return SampleSettings(
        auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"), rate_limit_per_tenant=1
    )


def routes() -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=GuardedRoute)

    @router.post("/read/{number}")
    async def read(number: int, body: Quota, caller: ClientPrincipal) -> str:
        return caller.tenant

    @router.put("/quota", dependencies=[Depends(RoleRequired("admin"))])
    async def quota(body: Quota, caller: ClientPrincipal) -> str:
        return caller.name

    return router


@pytest.mark.parametrize("body", [b'{"tenant": ', b"[" * 900])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/read/none"), ("PUT", "/v1/quota")])
async def test_refused_caller_learns_nothing_about_its_request(
    tmp_path: Path, method: str, path: str, body: bytes
) -> None:
    app = create_service_app(
        settings(tmp_path), "lmcache-servicekit", lifespan=no_parts, routers=[routes()]
    )
    async with asgi_client(app) as client:
        answer = await client.request(method, path, content=body, headers=JSON)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    async with asgi_client(app, CLIENT_TOKEN) as client:
        assert (await client.put("/v1/quota", content=body, headers=JSON)).status_code == 403
        again = await client.post(path, content=body, headers=JSON)
        assert again.status_code in (405, 429), "what was refused has counted"


async def test_an_action_whose_body_is_not_valid_is_audited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    app = create_service_app(
        settings(tmp_path), "lmcache-servicekit", lifespan=no_parts, routers=[routes()]
    )
    async with asgi_client(app, ADMIN_TOKEN) as client:
        assert (
            await client.put("/v1/quota", json={"tenant": "x", "num_bytes": "many"})
        ).status_code == 422
    [line] = [
        json.loads(record.getMessage()) for record in caplog.records if record.name == AUDIT_LOGGER
    ]
    assert (line["who"], line["status"], line["details"]) == (
        "a-acme",
        422,
        {"tenant": "x", "num_bytes": "many"},
    )


async def test_the_strictest_role_counts_and_the_call_counts_once(tmp_path: Path) -> None:
    app = create_service_app(
        settings(tmp_path), "lmcache-servicekit", lifespan=no_parts, routers=[routes()]
    )
    async with asgi_client(app, ADMIN_TOKEN) as client:
        answers = [
            await client.put("/v1/quota", json={"tenant": "x", "num_bytes": 1}) for _ in range(2)
        ]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[0].json() == "a-acme"


async def unguarded() -> str:
    return ""


def test_route_without_a_role_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="/v1/open: its endpoint takes neither ClientPrincipal"):
        APIRouter(prefix="/v1", route_class=GuardedRoute).get("/open")(unguarded)


def test_service_accepts_guarded_routes_only() -> None:
    router = APIRouter(prefix="/v1")
    router.get("/open")(unguarded)
    with pytest.raises(TypeError, match="admits every caller"):
        create_service_app(
            SampleSettings(), "lmcache-servicekit", lifespan=no_parts, routers=[router]
        )
