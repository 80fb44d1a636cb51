"""Routes that are asked all the time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from lmcache_servicekit.auth import GuardedRoute

from lmcache_lookup.dependencies import get_parts


class DirectRoute(GuardedRoute):
    """Hands its endpoint `request`, `caller` and `service`, which are all that it may take.

    FastAPI finds them, too, and documents them as ever; but that takes longer than all else that HTTP costs a lookup.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        guard = self.guard()
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint

        async def handle(request: Request) -> Response:
            caller = await guard.admit(request)
            parts = await get_parts(request)
            return await endpoint(request=request, caller=caller, service=parts.lookup)

        return handle
