"""Bounds request bodies, and the time that they take, before anything parses them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmcache_servicekit.problems import problem_response

DEFAULT_MAX_BODY_BYTES: Final = 4 << 20
BODY_TIMEOUT_S: Final = 10.0
MIN_BYTES_PER_S: Final = 1 << 20
"""A body may take `BODY_TIMEOUT_S`, and as long again as the largest there would take at this
speed.
"""

_CLOSE: Final = {"Connection": "close"}


class BodyLimitMiddleware:
    """Answers 413 to a request whose body is, or grows, larger than its bound, and 408 to one whose
    body does not come.

    FastAPI's own `max_body_size` answers plain text where the length is declared; ours is a problem
    in every case.

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
            response = problem_response(
                413, "Content Too Large", detail=_detail(bound), headers=_CLOSE
            )
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
                deadline = None  # what comes now is that the caller leaves
            num_bytes += len(message.get("body", b""))
            if num_bytes > bound:
                raise HTTPException(413, _detail(bound), _CLOSE)
            return message

        await self._app(scope, count, send)

    def _bound_of(self, path: str) -> int:
        return next(
            (bound for prefix, bound in self._overrides if path.startswith(prefix)),
            self._max_body_bytes,
        )


def _detail(bound: int) -> str:
    return f"a body here has at most {bound} bytes"
