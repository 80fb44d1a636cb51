"""The audit log of admin actions, and how much one tenant may ask."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from fastapi import FastAPI
from lmcache_core.security import RateLimiter
from lmcache_servicekit.audit import AUDIT_LOGGER, MAX_AUDITED_CHARS
from lmcache_servicekit.state import service_state

from tests.fixtures.sample_service import (
    ADMIN_TOKEN,
    CLIENT_TOKEN,
    SampleSettings,
    asgi_client,
    create_app,
    write_tokens,
)


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return create_app(
        SampleSettings(
            auth_tokens_file=write_tokens(tmp_path / "tokens.yaml", ["acme"]), instance_id="kit-0"
        )
    )


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    return caplog


def lines(audit: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [
        json.loads(record.getMessage()) for record in audit.records if record.name == AUDIT_LOGGER
    ]


async def test_an_action_is_one_line_with_who_what_and_how_it_ended(
    app: FastAPI, audit: pytest.LogCaptureFixture
) -> None:
    async with asgi_client(app, ADMIN_TOKEN) as client:
        secrets = {"chunk_hashes": ["secret"], "token_ids": [1], "password": "p"}
        await client.post("/v1/admin/clear", json={"tenant": "x", "all_tenants": False, **secrets})
    (line,) = lines(audit)
    assert str(line.pop("time")).endswith("Z")
    assert line == {
        "service": "lmcache-servicekit",
        "instance": "kit-0",
        "who": "a-acme",
        "tenant": "acme",
        "role": "admin",
        "client": "127.0.0.1",
        "what": "POST /v1/admin/clear",
        "details": {"tenant": "x", "all_tenants": False},
        "status": 200,
        "result": "done",
    }


@pytest.mark.parametrize(
    ("token", "who", "status"),
    [(CLIENT_TOKEN, "c-acme", 403), ("unknown-0123456789abcdef", None, 401)],
)
async def test_refused_action_is_one_line(
    app: FastAPI, audit: pytest.LogCaptureFixture, token: str | None, who: str | None, status: int
) -> None:
    async with asgi_client(app, token) as client:
        assert (await client.post("/v1/admin/clear", json={"tenant": "x"})).status_code == status
    (line,) = lines(audit)
    assert (line["who"], line["status"], line["result"], line["details"]) == (
        who,
        status,
        "refused",
        {},
    )


async def test_other_calls_are_not_audited(app: FastAPI, audit: pytest.LogCaptureFixture) -> None:
    async with asgi_client(app, ADMIN_TOKEN) as client:
        assert (await client.post("/v1/things", json={"text": "x"})).status_code == 200
        assert (await client.get("/v1/things/1")).status_code == 200
        assert (await client.get("/v1/admin/clear")).status_code == 405
    assert lines(audit) == []


@pytest.mark.parametrize(
    "body",
    [
        *(b"not JSON", b"[1, 2]", b"\xff\xfe", b"[" * 900),
        json.dumps({"tenant": "n" * 900}).encode(),
    ],
)
async def test_action_with_any_body_is_one_line(
    app: FastAPI, audit: pytest.LogCaptureFixture, body: bytes
) -> None:
    async with asgi_client(app, ADMIN_TOKEN) as client:
        assert (await client.post("/v1/admin/clear", content=body)).status_code == 200
    (line,) = lines(audit)
    assert line["details"] in ({}, {"tenant": "n" * MAX_AUDITED_CHARS})


async def test_text_of_callers_begins_no_line(
    app: FastAPI, audit: pytest.LogCaptureFixture
) -> None:
    async with asgi_client(app, ADMIN_TOKEN) as client:
        await client.post("/v1/admin/clear", json={"tenant": 'x"}\n{"who": "another"'})
    (record,) = [record for record in audit.records if record.name == AUDIT_LOGGER]
    assert "\n" not in record.getMessage()
    assert json.loads(record.getMessage())["details"] == {"tenant": 'x"}\n{"who": "another"'}


async def test_rate_is_limited_by_tenant(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.yaml", ["acme"])
    app = create_app(SampleSettings(auth_tokens_file=tokens, rate_limit_per_tenant=3))
    now = 50.0
    service_state(app).limiter = RateLimiter(0.5, lambda: now)
    async with asgi_client(app, CLIENT_TOKEN) as client:
        assert (await client.get("/v1/things/1")).status_code == 200
        admin = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        answer = await client.get("/v1/things/1", headers=admin)
        assert answer.status_code == 429, "its tokens share what it has"
        assert answer.headers["retry-after"] == "2"
        for path in ("/healthz", "/metrics"):
            assert (await client.get(path)).status_code == 200
        stranger = {"authorization": "Bearer unknown-0123456789abcdef"}
        assert (await client.get("/v1/things/1", headers=stranger)).status_code == 401
        now += 2.0
        assert (await client.get("/v1/things/1")).status_code == 200
