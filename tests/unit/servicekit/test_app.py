"""Callers, bodies, metrics and probes of a service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from lmcache_core.errors import ConfigError
from lmcache_servicekit.app import BUILD_INFO
from lmcache_servicekit.requests import HTTP_REQUEST_DURATION_SECONDS, HTTP_REQUESTS_TOTAL
from lmcache_servicekit.settings import read_secret_file
from lmcache_servicekit.state import service_state

from tests.fixtures.sample_service import (
    CLIENT_TOKEN,
    Failures,
    SampleSettings,
    asgi_client,
    create_app,
    write_tokens,
)


async def test_without_tokens_every_caller_is_the_default_tenants_admin() -> None:
    async with asgi_client(create_app(SampleSettings()), "whatever") as client:
        assert (await client.get("/v1/things/1")).json() == {
            "tenant": "default",
            "role": "admin",
            "name": "anonymous",
        }


@pytest.mark.parametrize("header", ["Basic abc", "bearer  ", f"Token {CLIENT_TOKEN}"])
async def test_other_schemes_are_no_credentials(tmp_path: Path, header: str) -> None:
    settings = SampleSettings(auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"))
    async with asgi_client(create_app(settings)) as client:
        response = await client.get("/v1/things/1", headers={"authorization": header})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


async def parts(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b"x" * 100


async def test_too_large_body_is_refused_with_or_without_its_length() -> None:
    headers = {"content-type": "application/json"}
    async with asgi_client(create_app(SampleSettings())) as client:
        assert (await client.post("/v1/things", json={"text": "x" * 900})).status_code == 200
        for content in (b"x" * 1001, parts(1100)):
            response = await client.post("/v1/things", content=content, headers=headers)
            assert (response.status_code, response.json()["title"]) == (413, "Content Too Large")
            assert response.headers["content-type"] == "application/problem+json"
        for length in ("-1", "9" * 40):
            response = await client.post(
                "/v1/things", content=b"{}", headers=headers | {"content-length": length}
            )
            assert response.status_code == 413
        assert (await client.post("/v1/large/x", content=b"x" * 4000)).status_code == 404


def samples(app_metrics: str, name: str) -> dict[str, float]:
    found = {}
    for line in app_metrics.splitlines():
        if line.startswith(f"{name}{{"):
            labels, _, value = line.rpartition(" ")
            found[labels.removeprefix(name)] = float(value)
    return found


async def test_requests_are_counted_by_route_template() -> None:
    failures = Failures()
    async with asgi_client(create_app(SampleSettings(), failures)) as client:
        for number in range(3):
            await client.get(f"/v1/things/{number}")
        await client.get("/v1/things/x")
        await client.get("/v1/fail")
        await client.get("/etc/passwd")
        await client.request("BREW", "/v1/things/1")
        text = (await client.get("/metrics")).text
    counted = samples(text, HTTP_REQUESTS_TOTAL)
    assert counted['{method="GET",route="/v1/things/{number}",status="200"}'] == 3
    assert counted['{method="GET",route="/v1/things/{number}",status="422"}'] == 1
    assert counted['{method="GET",route="/v1/fail",status="500"}'] == 1
    assert counted['{method="GET",route="unmatched",status="404"}'] == 1
    assert any('method="other"' in labels for labels in counted)
    assert "passwd" not in text
    assert (
        samples(text, f"{HTTP_REQUEST_DURATION_SECONDS}_count")[
            '{method="GET",route="/v1/things/{number}"}'
        ]
        == 4
    )
    assert BUILD_INFO in text


def test_secret_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(" s3cret \n")
    assert read_secret_file(path, "token_file") == "s3cret"
    assert read_secret_file(None, "token_file") is None
    path.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        read_secret_file(path, "token_file")


async def test_root_describes_the_service() -> None:
    async with asgi_client(create_app(SampleSettings())) as client:
        body = (await client.get("/")).json()
        assert (body["name"], body["description"]) == (
            "lmcache-servicekit",
            "Shows what services share.",
        )
        for link in ("openapi", "liveness", "readiness", "metrics"):
            assert (await client.get(body[link])).status_code == 200


async def test_probes_have_their_own_listener_without_authentication(tmp_path: Path) -> None:
    settings = SampleSettings(
        auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"), health_port=0
    )
    app = create_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        url = f"http://127.0.0.1:{service_state(app).ports['health_port']}"
        assert [
            (await client.get(url + path)).status_code
            for path in ("/healthz", "/readyz", "/metrics")
        ] == [200, 200, 200]
        for path in ("/v1/things/1", "/openapi.json"):
            assert (await client.get(url + path)).status_code == 404
    taken = create_app(SampleSettings(health_port=1, health_host="192.0.2.1"))
    with pytest.raises(ConfigError, match=r"health_port=1: cannot listen on 192\.0\.2\.1: "):
        async with taken.router.lifespan_context(taken):
            pass
