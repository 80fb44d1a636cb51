"""The middleware around each request: its id, in every log line and problem; its span if requests
are traced; its metrics; its line in the audit log; and the bounds of its body.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import Final

from fastapi import HTTPException
from lmcache_core.telemetry.request_context import (
    REQUEST_ID_HEADER,
    TRACEPARENT_HEADER,
    Carried,
    RequestIds,
    working_for,
)
from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmcache_servicekit.audit import end_audit
from lmcache_servicekit.problems import problem_response
from lmcache_servicekit.state import ServiceState

logger = logging.getLogger(__name__)

HTTP_REQUESTS_TOTAL: Final = "lmcache_http_requests_total"
HTTP_REQUEST_DURATION_SECONDS: Final = "lmcache_http_request_duration_seconds"

UNMATCHED: Final = "unmatched"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

DEFAULT_MAX_BODY_BYTES: Final = 4 << 20
BODY_TIMEOUT_S: Final = 10.0
MIN_BYTES_PER_S: Final = 1 << 20
"""A body may take `BODY_TIMEOUT_S`, plus the time of the largest allowed body at this speed."""

_CLOSE: Final = {"Connection": "close"}

_REQUEST_ID: Final = REQUEST_ID_HEADER.encode()
_TRACEPARENT: Final = TRACEPARENT_HEADER.encode()
_BEGIN: Final = re.compile(
    r"/v1/(?:admin/)?[a-z-]{1,12}(?::[a-z]{1,12})?(?![^/])|/mutate$|/healthz$|/readyz$|/metrics$"
)
_UNTRACED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that are polled, not requested by users."""


class RequestMiddleware:
    """Takes `X-Request-Id` and `traceparent` from a request, or generates an id, and returns the id
    with the response; traces, counts and audits the request. HEAD is answered as GET, by the HTTP
    server without the body.

    Args:
        state: Has the registry, and the tracer once the app runs.
    """

    def __init__(self, app: ASGIApp, state: ServiceState, service: str) -> None:
        self._app = app
        self._state = state
        self._service = service
        self._ids = RequestIds()
        self._requests = Counter(
            HTTP_REQUESTS_TOTAL,
            "HTTP requests answered.",
            ["method", "route", "status"],
            registry=state.registry,
        )
        self._duration = Histogram(
            HTTP_REQUEST_DURATION_SECONDS,
            "Seconds from request to end of answer.",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=state.registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and account for it; one that is not answered counts as 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came = self._came_with(scope)
        # The server looks at the method of its own scope when it leaves out the body.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        # Other path segments written by callers may be secret.
        begin = _BEGIN.match(scope["path"])
        name = f"{scope['method']} {begin[0] if begin else UNMATCHED}"
        status, has_begun, started = 500, False, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                logger.debug("request answered: request=%s status=%d", name, status)
                headers = [*message.get("headers", ()), (_REQUEST_ID, came.request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        tracer = None if scope["path"] in _UNTRACED else self._state.tracer
        with working_for(name, came, tracer):
            try:
                await self._app(asked, receive, watch)
            except asyncio.CancelledError:
                # Nothing else cancels requests; raised, it would be logged with its traceback.
                logger.warning("request not answered in time, the process ends: request=%s", name)
                if not has_begun:
                    response = problem_response(503, "Service Unavailable", headers=_CLOSE)
                    await response(scope, receive, watch)
            finally:
                end_audit(asked, self._service, self._state.settings.instance_id, status)
                route = asked.get("route")
                self._count(scope["method"], route, status, time.perf_counter() - started)

    def _came_with(self, scope: Scope) -> Carried:
        """Return the caller's context, without malformed parts; always with an id."""
        given = {
            name: value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (_REQUEST_ID, _TRACEPARENT)
        }
        request_id, traceparent = Carried.checked(
            given.get(_REQUEST_ID, ""), given.get(_TRACEPARENT, "")
        )
        return Carried(request_id or self._ids.next(), traceparent)

    def _count(self, method: str, route: object, status: int, elapsed_s: float) -> None:
        # Labels are bounded: a route's template instead of a path, known methods only.
        method = method if method in _METHODS else "other"
        path = getattr(route, "path", None)
        place = path if isinstance(path, str) else UNMATCHED
        self._requests.labels(method, place, str(status)).inc()
        self._duration.labels(method, place).observe(elapsed_s)


class BodyLimitMiddleware:
    """Answers 413 to a request whose body is, or grows, larger than its bound, and 408 to one whose
    body does not arrive.

    FastAPI's own `max_body_size` answers in plain text if the length is declared; here the answer
    is always a problem.

    Args:
        max_body_bytes: Bounds by path prefix; the longest prefix counts, and `""` is
            `DEFAULT_MAX_BODY_BYTES` unless it is given.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: Mapping[str, int]) -> None:
        self._app = app
        bounds = {"": DEFAULT_MAX_BODY_BYTES} | dict(max_body_bytes)
        self._bounds = sorted(bounds.items(), key=lambda item: -len(item[0]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse immediately if the declared body is too large, and watch others grow."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        bound = next(bound for prefix, bound in self._bounds if path.startswith(prefix))
        detail = f"a body here has at most {bound} bytes"
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared[:19]) > bound:
            response = problem_response(413, "Content Too Large", detail=detail, headers=_CLOSE)
            await response(scope, receive, send)
            return
        num_bytes = 0
        timeout_s = BODY_TIMEOUT_S + bound / MIN_BYTES_PER_S
        deadline: float | None = asyncio.get_running_loop().time() + timeout_s

        async def count() -> Message:
            nonlocal num_bytes, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"a body here arrives within {timeout_s:.0f} s", _CLOSE
                ) from None
            if not message.get("more_body", False):
                deadline = None  # from here on only a disconnect can arrive
            num_bytes += len(message.get("body", b""))
            if num_bytes > bound:
                raise HTTPException(413, detail, _CLOSE)
            return message

        await self._app(scope, count, send)
