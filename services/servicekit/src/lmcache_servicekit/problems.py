"""RFC 9457: the table that maps domain errors to problem+json, and the handlers that use it.

Source: RFC 9457, section 3 (members of a problem details object).
"""

from __future__ import annotations

import difflib
import http
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NotRequired

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from lmcache_core import errors as core
from lmcache_core.telemetry.request_context import current_request_id
from pydantic import ConfigDict, TypeAdapter, with_config
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from typing_extensions import TypedDict

from lmcache_servicekit import errors
from lmcache_servicekit.settings import in_words

logger = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
MAX_SHOWN_ERRORS: Final = 16
MAX_COMPARED_PATH: Final = 100
"""Longest path, in characters, for which the nearest one is looked for."""
_DESCRIBED: Final = ConfigDict(use_attribute_docstrings=True)
_TYPE_PREFIX: Final = "urn:lmcache:problem:"


@with_config(_DESCRIBED)
class BrokenRule(TypedDict):
    """What is wrong with a request."""

    at: str
    """Path to the wrong part, for example `body.keys.0`."""
    message: str
    """The rule that it breaks."""


@with_config(_DESCRIBED)
class Problem(TypedDict):
    """RFC 9457 problem details."""

    type: str
    """A URI reference. Stable; compare this, not the texts."""
    title: str
    """The same text for every problem of this type."""
    status: int
    """The HTTP status, repeated."""
    detail: NotRequired[str]
    """What is wrong this time; absent if the title says all."""
    errors: NotRequired[list[BrokenRule]]
    """Only with 400 and 422: what is wrong; of many places the first."""
    request_id: NotRequired[str]
    """The request's `X-Request-Id`, also in log lines."""


PROBLEM_RESPONSE: Final = {
    "description": "A problem: its `type` says which.",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def problem_schemas() -> dict[str, Any]:
    """Return the schemas of a problem and its parts by name."""
    _, schemas = TypeAdapter.json_schemas(
        [("problem", "serialization", TypeAdapter(Problem))],
        ref_template="#/components/schemas/{model}",
    )
    found: dict[str, Any] = schemas["$defs"]
    return found


@dataclass(frozen=True, slots=True)
class ProblemType:
    """The HTTP form of one kind of error.

    Attributes:
        slug: Last part of the `type` URN; stable, clients may compare it.
        title: One sentence for people, the same for all occurrences.
        shows_detail: Whether the error's own text is sent. Not for internal failures: it may name
            hosts or paths.
    """

    slug: str
    status: int
    title: str
    shows_detail: bool = True
    headers: Mapping[str, str] | None = None

    @property
    def type(self) -> str:
        """The problem's `type`."""
        return f"{_TYPE_PREFIX}{self.slug}"


MALFORMED: Final = ProblemType("malformed", 400, "The body is not well-formed")
INVALID: Final = ProblemType("invalid", 422, "The request is not valid")
_RETRY: Final = {"Retry-After": "1"}
# RFC 9110 renamed it; Python's table follows from 3.13 on.
_TITLES: Final = {413: "Content Too Large"}
_METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_BEARER: Final = {"WWW-Authenticate": "Bearer"}

PROBLEMS: Final[Mapping[type[Exception], ProblemType]] = {
    core.LMCacheError: ProblemType("internal", 500, "The service failed", shows_detail=False),
    core.ConfigError: ProblemType("bad-option", 400, "An option is unknown or impossible"),
    core.IdentityError: ProblemType("bad-key", 400, "A key or id cannot be read"),
    core.RecordError: ProblemType("bad-record", 422, "The body is not an intact record"),
    core.SerdeError: ProblemType("bad-encoding", 422, "Bytes are not an intact encoding"),
    core.ProtocolError: ProblemType("protocol", 400, "The protocol was violated"),
    core.VersionError: ProblemType("version", 400, "No common protocol version"),
    core.UnavailableError: ProblemType(
        "unavailable",
        503,
        "A dependency did not answer in time",
        shows_detail=False,
        headers=_RETRY,
    ),
    core.AuthenticationError: ProblemType(
        "unauthenticated", 401, "Credentials are missing or unknown", headers=_BEARER
    ),
    core.CapacityError: ProblemType("capacity", 507, "A capacity bound is reached"),
    core.IntegrityError: ProblemType("integrity", 500, "The service failed", shows_detail=False),
    core.LayoutError: ProblemType("bad-layout", 400, "The memory layout does not fit"),
    errors.NotFoundError: ProblemType("not-found", 404, "There is no such resource"),
    errors.ConflictError: ProblemType("conflict", 409, "The request contradicts the current state"),
    errors.PermissionDeniedError: ProblemType(
        "forbidden", 403, "The caller's role does not allow this"
    ),
    errors.ThrottledError: ProblemType("throttled", 429, "Too much at once", headers=_RETRY),
}


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses` for problems of its own. Those that follow from its parameters,
    its body and its role are documented without it.
    """
    return {status: {} for status in statuses}


def problem_of(
    error: Exception, table: Mapping[type[Exception], ProblemType] = PROBLEMS
) -> ProblemType:
    """Return the entry for `error`'s class, or for the nearest class above it."""
    for kind in type(error).__mro__:
        if kind in table:
            return table[kind]
    return table[core.LMCacheError]


def problem_response(
    status: int, title: str, kind: str = "about:blank", detail: str | None = None, **more: Any
) -> JSONResponse:
    """Build the response.

    Args:
        status: HTTP status, repeated in the body.
        title: The same for every occurrence of the problem.
        kind: The `type` URI.
        detail: Specific to this occurrence; never a secret, never the text of an internal failure.
        more: Extension members; `headers` is taken as the response's headers.
    """
    headers = more.pop("headers", None)
    request_id = current_request_id()
    body = {
        "type": kind,
        "title": title,
        "status": status,
        **({"detail": detail} if detail else {}),
        **more,
    }
    if request_id:
        body["request_id"] = request_id
    return JSONResponse(body, status, headers=headers, media_type=MEDIA_TYPE)


def install_problem_handlers(
    app: FastAPI, more: Mapping[type[Exception], ProblemType] | None = None
) -> None:
    """Answer every error of `app` with problem+json.

    Args:
        more: Entries for a service's own errors, which take precedence over `PROBLEMS`.
    """
    table = {**PROBLEMS, **(more or {})}

    async def on_domain_error(request: Request, error: Exception) -> JSONResponse:
        problem = problem_of(error, table)
        if problem.status >= 500:
            path = getattr(request.scope.get("route"), "path", "(no route)")
            logger.warning(
                "request failed: request=%s %s status=%d error=%s",
                request.method,
                path,
                problem.status,
                error,
            )
        detail = str(error) if problem.shows_detail else None
        headers = problem.headers
        if isinstance(error, errors.ThrottledError) and error.retry_after_s is not None:
            headers = {**(headers or {}), "Retry-After": str(math.ceil(error.retry_after_s))}
        return problem_response(
            problem.status, problem.title, problem.type, detail, headers=headers
        )

    app.add_exception_handler(core.LMCacheError, on_domain_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_lost_client)
    app.add_exception_handler(Exception, _on_bug)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """Report locations and rules, never the input, which may be large or secret."""
    assert isinstance(error, RequestValidationError)
    found = [
        {"at": ".".join(str(part) for part in item["loc"]), "message": in_words(item)}
        for item in error.errors()[:MAX_SHOWN_ERRORS]
    ]
    if any(item.get("type") == "json_invalid" for item in error.errors()):
        return problem_response(MALFORMED.status, MALFORMED.title, MALFORMED.type, errors=found)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if error.body and not is_json and any(item["loc"] == ("body",) for item in error.errors()):
        return problem_response(
            415, "Unsupported Media Type", detail="send JSON, with Content-Type: application/json"
        )
    return problem_response(INVALID.status, INVALID.title, INVALID.type, errors=found)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    title = _TITLES.get(error.status_code) or http.HTTPStatus(error.status_code).phrase
    detail = error.detail if error.detail and error.detail != title else None
    headers = error.headers
    if error.status_code == 405:
        # starlette names the methods of one route, and a path may have several
        allowed = [
            method
            for method in _METHODS
            if any(
                route.matches({**request.scope, "method": method})[0] is Match.FULL
                for route in request.app.routes
            )
        ]
        headers = {**(headers or {}), "Allow": ", ".join(allowed)}
        detail = f"here is only {', '.join(allowed)}"
    elif error.status_code == 404 and detail is None:
        detail = f"{_nearest_path(request)}/openapi.json lists all paths"
    return problem_response(error.status_code, title, detail=detail, headers=headers)


def _nearest_path(request: Request) -> str:
    """Return the beginning of a sentence; only our own paths are named, which are public."""
    path = request.scope["path"]
    known = request.app.openapi()["paths"]
    near = difflib.get_close_matches(path, known, n=1) if len(path) <= MAX_COMPARED_PATH else []
    return f"the nearest path is {near[0]}; " if near else ""


async def _on_lost_client(request: Request, error: Exception) -> JSONResponse:
    # No client reads this response, but without it the server logs a traceback for each client that
    # dies while sending.
    return problem_response(
        400, http.HTTPStatus(400).phrase, detail="the client disconnected in the middle of its body"
    )


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    # The ASGI boundary. Starlette raises the error again after this response, so that the server
    # logs its traceback.
    return problem_response(
        500, PROBLEMS[core.LMCacheError].title, PROBLEMS[core.LMCacheError].type
    )
