"""Bounds request bodies before anything parses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmcache_servicekit.problems import problem_response

DEFAULT_MAX_BODY_BYTES: Final = 4 << 20


class BodyLimitMiddleware:
    """Answers 413 to a request whose body is, or grows, larger than its bound.

    FastAPI's own `max_body_size` answers plain text where the length is declared; ours is a problem in every case.

    Args:
        app: The next application.
        max_body_bytes: The bound for all paths.
        overrides: Other bounds, by path prefix; the longest prefix counts.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, overrides: Mapping[str, int]) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._overrides = sorted(overrides.items(), key=lambda item: -len(item[0]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse at once what declares too large a body, and watch the rest grow."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        bound = self._bound_of(scope["path"])
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared[:19]) > bound:
            response = problem_response(413, "Content Too Large", detail=_detail(bound), headers={"Connection": "close"})
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > bound:
                raise HTTPException(413, _detail(bound))
            return message

        await self._app(scope, count, send)

    def _bound_of(self, path: str) -> int:
        return next((bound for prefix, bound in self._overrides if path.startswith(prefix)), self._max_body_bytes)


def _detail(bound: int) -> str:
    return f"a body here has at most {bound} bytes"
