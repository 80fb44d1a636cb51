"""Whose request it is: an id that callers give or get, in every log line and problem, and a span
where requests are traced.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from lmcache_core.telemetry.request_context import (
    REQUEST_ID_HEADER,
    TRACEPARENT_HEADER,
    Carried,
    RequestIds,
    working_for,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmcache_servicekit.metrics import UNMATCHED
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
    """Takes `X-Request-Id` and `traceparent` from a request, or makes an id, and tells the id in
    the answer.

    Args:
        app: What answers.
        state: Has the tracer, once the app runs.
    """

    def __init__(self, app: ASGIApp, state: ServiceState) -> None:
        self._app = app
        self._state = state
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on within whose it is."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came = self._came_with(scope)
        name, told = _name_of(scope), (_REQUEST_ID, came.request_id.encode())

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                logger.debug("%s is answered %d", name, message["status"])
                message = {**message, "headers": [*message.get("headers", ()), told]}
            await send(message)

        tracer = None if scope["path"] in _UNTRACED else self._state.tracer
        with working_for(name, came, tracer):
            await self._app(scope, receive, tell)

    def _came_with(self, scope: Scope) -> Carried:
        """What the caller sent, as far as it has the form; an id in any case."""
        given = {
            name: value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (_REQUEST_ID, _TRACEPARENT)
        }
        request_id, traceparent = Carried.checked(
            given.get(_REQUEST_ID, ""), given.get(_TRACEPARENT, "")
        )
        return Carried(request_id or self._ids.next(), traceparent)


def _name_of(scope: Scope) -> str:
    """Method and the path's begin, as far as it can be one of ours: what else callers write
    there may be secret.
    """
    begin = _BEGIN.match(scope["path"])
    return f"{scope['method']} {begin[0] if begin else UNMATCHED}"
