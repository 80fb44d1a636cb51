"""What surrounds each request: its id, in every log line and problem, its span where requests are
traced, its metrics and its line in the audit log.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Final

from lmcache_core.telemetry.request_context import (
    REQUEST_ID_HEADER,
    TRACEPARENT_HEADER,
    Carried,
    RequestIds,
    working_for,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmcache_servicekit.audit import end_audit
from lmcache_servicekit.metrics import UNMATCHED, RequestMetrics
from lmcache_servicekit.state import ServiceState

logger = logging.getLogger(__name__)

_REQUEST_ID: Final = REQUEST_ID_HEADER.encode()
_TRACEPARENT: Final = TRACEPARENT_HEADER.encode()
_BEGIN: Final = re.compile(
    r"/v1/(?:admin/)?[a-z-]{1,12}(?::[a-z]{1,12})?(?![^/])|/mutate$|/healthz$|/readyz$|/metrics$"
)
_UNTRACED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that are polled, not asked for by a user's request."""


class RequestMiddleware:
    """Takes `X-Request-Id` and `traceparent` from a request, or makes an id, and returns the id
    with the answer; traces, counts and audits the request.

    Args:
        app: What answers.
        state: Has the registry, and the tracer once the app runs.
        service: Name of the service.
    """

    def __init__(self, app: ASGIApp, state: ServiceState, service: str) -> None:
        self._app = app
        self._state = state
        self._service = service
        self._ids = RequestIds()
        self._metrics = RequestMetrics(state.registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and account for it; one that is not answered counts as 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came = self._came_with(scope)
        # What else callers write into a path may be secret.
        begin = _BEGIN.match(scope["path"])
        name = f"{scope['method']} {begin[0] if begin else UNMATCHED}"
        status, started = 500, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                logger.debug("request answered: request=%s status=%d", name, status)
                headers = [*message.get("headers", ()), (_REQUEST_ID, came.request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        tracer = None if scope["path"] in _UNTRACED else self._state.tracer
        with working_for(name, came, tracer):
            try:
                await self._app(scope, receive, watch)
            finally:
                end_audit(scope, self._service, self._state.settings.instance_id, status)
                self._metrics.count(scope, status, time.perf_counter() - started)

    def _came_with(self, scope: Scope) -> Carried:
        """Return what the caller sent, without malformed parts; an id in any case."""
        given = {
            name: value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (_REQUEST_ID, _TRACEPARENT)
        }
        request_id, traceparent = Carried.checked(
            given.get(_REQUEST_ID, ""), given.get(_TRACEPARENT, "")
        )
        return Carried(request_id or self._ids.next(), traceparent)
