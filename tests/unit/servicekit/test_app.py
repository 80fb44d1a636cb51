"""Authentication, body bounds, metrics."""

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
    ADMIN_TOKEN,
    CLIENT_TOKEN,
    Failures,
    SampleSettings,
    asgi_client,
    create_app,
    write_tokens,
)


async def test_without_tokens_everybody_is_the_default_tenants_admin() -> None:
    async with asgi_client(create_app(SampleSettings()), "whatever") as client:
        assert (await client.get("/v1/things/1")).json() == {
            "tenant": "default",
            "role": "admin",
            "name": "anonymous",
        }


@pytest.mark.parametrize(
    ("token", "things", "admin"),
    [
        (CLIENT_TOKEN, 200, 403),
        (ADMIN_TOKEN, 200, 200),
        (None, 401, 401),
        ("wrong-0123456789ab", 401, 401),
    ],
)
async def test_roles(tmp_path: Path, token: str | None, things: int, admin: int) -> None:
    settings = SampleSettings(auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"))
    async with asgi_client(create_app(settings), token) as client:
        assert (await client.get("/v1/things/1")).status_code == things
        assert (await client.post("/v1/admin/clear")).status_code == admin
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("header", ["Basic abc", "Bearer", "bearer  ", f"Token {CLIENT_TOKEN}"])
async def test_other_schemes_are_no_credentials(tmp_path: Path, header: str) -> None:
    settings = SampleSettings(auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"))
    async with asgi_client(create_app(settings)) as client:
        response = await client.get("/v1/things/1", headers={"authorization": header})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


async def test_a_changed_token_file_is_taken_while_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tokens(tmp_path / "tokens.yaml")
    app = create_app(SampleSettings(auth_tokens_file=path))
    async with asgi_client(app, CLIENT_TOKEN) as client:
        write_tokens(path, ["other"])
        service_state(app).tokens.reload_if_changed()
        assert (await client.get("/v1/things/1")).json()["tenant"] == "other"


async def parts(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b"x" * 100


async def test_a_body_that_is_too_large_is_refused_whether_or_not_it_says_so() -> None:
    headers = {"content-type": "application/json"}
    async with asgi_client(create_app(SampleSettings())) as client:
        assert (await client.post("/v1/things", json={"text": "x" * 900})).status_code == 200
        for content in (b"x" * 1001, parts(1100)):
            response = await client.post("/v1/things", content=content, headers=headers)
            assert (response.status_code, response.json()["title"]) == (413, "Content Too Large")
            assert response.headers["content-type"] == "application/problem+json"
        for length in ("-1", "1e3", "9" * 40):
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


async def test_the_root_says_what_this_is_and_where_the_rest_is() -> None:
    async with asgi_client(create_app(SampleSettings())) as client:
        body = (await client.get("/")).json()
        assert (body["name"], body["description"]) == (
            "lmcache-servicekit",
            "Shows what services share.",
        )
        for link in ("openapi", "liveness", "readiness", "metrics"):
            assert (await client.get(body[link])).status_code == 200


async def test_probes_have_a_listener_of_their_own_that_asks_for_nothing(tmp_path: Path) -> None:
    settings = SampleSettings(
        auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"), health_port=0
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app), httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{service_state(app).ports['health_port']}"
        assert [
            (await client.get(url + path)).status_code
            for path in ("/healthz", "/readyz", "/metrics")
        ] == [200, 200, 200]
        assert (await client.get(f"{url}/v1/things/1")).status_code == 404
    taken = create_app(SampleSettings(health_port=1, health_host="192.0.2.1"))
    with pytest.raises(ConfigError, match=r"health_port=1: cannot listen on 192\.0\.2\.1: "):
        async with taken.router.lifespan_context(taken):
            pass
