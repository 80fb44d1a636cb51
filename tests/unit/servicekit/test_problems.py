"""Errors are answered as RFC 9457 problems, which say no more than they should."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import lmcache_core.errors
import pytest
from fastapi import APIRouter, FastAPI, Request
from lmcache_core.errors import (
    AuthenticationError,
    CapacityError,
    ConfigError,
    IdentityError,
    LMCacheError,
    RecordError,
    UnavailableError,
)
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute
from lmcache_servicekit.errors import (
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
    StoreRefusedError,
    ThrottledError,
)
from lmcache_servicekit.problems import MAX_SHOWN_ERRORS, PROBLEMS, install_problem_handlers
from starlette.types import Message

from tests.fixtures.sample_service import (
    CLIENT_TOKEN,
    Failures,
    SampleSettings,
    asgi_client,
    create_app,
    no_parts,
    write_tokens,
)


def errors_below(root: type[LMCacheError]) -> Iterator[type[LMCacheError]]:
    yield root
    for kind in root.__subclasses__():
        yield from errors_below(kind)


def test_every_error_has_a_problem_type() -> None:
    """Each has an entry, or a base that has one. A service maps its own."""
    for package in ("lmcache_core.security", "lmcache_core.lookup", "lmcache_core.record"):
        module = importlib.import_module(package)
        for info in pkgutil.iter_modules(module.__path__):
            importlib.import_module(f"{package}.{info.name}")
    ours = [
        kind
        for kind in errors_below(LMCacheError)
        if kind is not LMCacheError
        and kind.__module__.startswith(("lmcache_core.", "lmcache_servicekit."))
    ]
    assert len(ours) >= 15
    assert not [
        kind.__qualname__
        for kind in ours
        if not any(base in PROBLEMS for base in kind.__mro__[: kind.__mro__.index(LMCacheError)])
    ]


async def answer_to(error: Exception) -> tuple[int, dict[str, object], dict[str, str]]:
    failures = Failures()
    failures.error = error
    async with asgi_client(create_app(SampleSettings(), failures)) as client:
        response = await client.get("/v1/fail")
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["status"] == response.status_code
    return response.status_code, response.json(), dict(response.headers)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ConfigError("why it failed"), 400, "bad-option"),
        (IdentityError("why it failed"), 400, "bad-key"),
        (RecordError("digest", "why it failed"), 422, "bad-record"),
        (AuthenticationError("why it failed"), 401, "unauthenticated"),
        (PermissionDeniedError("why it failed"), 403, "forbidden"),
        (NotFoundError("why it failed"), 404, "not-found"),
        (ConflictError("why it failed"), 409, "conflict"),
        (CapacityError("why it failed"), 507, "capacity"),
        (ThrottledError("why it failed"), 429, "throttled"),
    ],
)
async def test_domain_error_shows_its_text(error: Exception, status: int, kind: str) -> None:
    found, body, headers = await answer_to(error)
    assert (found, body["type"]) == (status, f"urn:lmcache:problem:{kind}")
    assert headers.get("retry-after") == ("1" if kind == "throttled" else None)
    assert "why it failed" in str(body["detail"])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnavailableError("secret host"), 503),
        (StoreRefusedError("secret host"), 503),
        (lmcache_core.errors.IntegrityError("secret"), 500),
        (LMCacheError("secret"), 500),
    ],
)
async def test_internal_failure_shows_nothing(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    found, body, headers = await answer_to(error)
    assert (found, headers.get("retry-after")) == (status, "1" if status == 503 else None)
    assert "secret" not in str(body)
    assert "secret" in caplog.text


async def test_bug_is_a_problem_without_detail() -> None:
    status, body, _ = await answer_to(RuntimeError("secret"))
    assert (status, body) == (
        500,
        {"type": "urn:lmcache:problem:internal", "title": "The service failed", "status": 500},
    )


async def test_a_validation_error_names_the_place_and_not_the_input() -> None:
    async with asgi_client(create_app(SampleSettings())) as client:
        response = await client.post("/v1/things", json={"text": ["hunter2"] * 20})
        assert response.status_code == 422
        assert response.json()["errors"] == [
            {"at": "body.text", "message": "must be a valid string"}
        ]
        assert "hunter2" not in response.text
        broken = await client.post(
            "/v1/things", content=b"{hunter2", headers={"content-type": "application/json"}
        )
        assert (broken.status_code, broken.json()["type"], "hunter2" in broken.text) == (
            400,
            "urn:lmcache:problem:malformed",
            False,
        )
        many = await client.get("/v1/things/x", params={"a": "1"})
        assert len(many.json()["errors"]) <= MAX_SHOWN_ERRORS


async def test_json_without_a_content_type_is_refused() -> None:
    """A page in a browser can send that to loopback without asking."""
    async with asgi_client(create_app(SampleSettings())) as client:
        assert (
            await client.post(
                "/v1/things", content=b'{"text": "x"}', headers={"content-type": "text/plain"}
            )
        ).status_code == 415
        assert (await client.post("/v1/things", content=b'{"text": "x"}')).status_code == 415
        assert (await client.post("/v1/things")).status_code == 422, "nothing came, of no type"


async def test_wrong_method_is_answered_with_the_allowed_ones() -> None:
    """RFC 9110, section 15.5.6."""
    router = APIRouter(prefix="/v1", route_class=GuardedRoute)

    async def answer(caller: ClientPrincipal) -> str:
        return caller.name

    for method in ("GET", "PUT", "DELETE"):
        router.add_api_route("/others/{number}", answer, methods=[method])
    async with asgi_client(
        create_service_app(
            SampleSettings(), "lmcache-servicekit", lifespan=no_parts, routers=[router]
        )
    ) as client:
        response = await client.post("/v1/others/1")
        assert (response.status_code, response.headers["allow"]) == (405, "DELETE, GET, PUT")
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["detail"] == "here is only DELETE, GET, PUT"
        assert (await client.post("/healthz")).headers["allow"] == "GET"


async def test_an_unknown_path_is_answered_with_the_nearest_one() -> None:
    async with asgi_client(create_app(SampleSettings())) as client:
        details = {
            path: (await client.get(path)).json()["detail"]
            for path in ("/healthy", "/hunter2", "/healthz" * 99)
        }
    everywhere = "/openapi.json lists all paths"
    assert details["/healthy"] == f"the nearest path is /healthz; {everywhere}"
    assert details["/hunter2"] == details["/healthz" * 99] == everywhere


async def test_an_unknown_query_parameter_is_refused_after_the_caller_was_let_in(
    tmp_path: Path,
) -> None:
    settings = SampleSettings(auth_tokens_file=write_tokens(tmp_path / "tokens.yaml"))
    async with asgi_client(create_app(settings)) as client:
        assert (await client.get("/v1/things/1?limt=3")).status_code == 401
        headers = {"authorization": f"Bearer {CLIENT_TOKEN}"}
        response = await client.get("/v1/things/1?limt=3", headers=headers)
        assert (response.status_code, response.json()["type"]) == (
            422,
            "urn:lmcache:problem:invalid",
        )
        assert response.json()["errors"] == [
            {"at": "query.limt", "message": "unknown parameter; known: none"}
        ]


async def test_client_that_leaves_within_its_body_is_no_bug() -> None:
    app = FastAPI()
    install_problem_handlers(app)

    @app.post("/bodies")
    async def take(request: Request) -> int:
        return len(await request.body())

    coming: list[Message] = [
        {"type": "http.request", "body": b"half of", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return coming.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/bodies", "http_version": "1.1"}
    scope |= {"headers": [], "query_string": b""}
    await app(scope, receive, send)
    assert sent[0]["status"] == 400
