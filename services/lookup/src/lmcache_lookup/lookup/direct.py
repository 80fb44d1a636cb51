"""Routes that are asked all the time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from lmcache_servicekit.auth import GuardedRoute

from lmcache_lookup.dependencies import get_parts

_PARAMETERS: Final = {"request", "caller", "service"}
# Of the three, what FastAPI would call for `caller` and `service`.
_NUM_DEPENDENCIES: Final = 2


class DirectRoute(GuardedRoute):
    """Hands its endpoint `request`, `caller` and `service`, which are all that it may take.

    FastAPI finds them, too, and documents them as ever; but that takes longer than all else that
    HTTP costs a lookup.

    Raises:
        TypeError: The route has further parameters or dependencies, which nothing would run.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        is_plain = set(inspect.signature(endpoint).parameters) == _PARAMETERS
        if not is_plain or len(self.dependant.dependencies) != _NUM_DEPENDENCIES:
            rule = "must take request, caller and service, and have no further dependencies"
            raise TypeError(f"{path}: a DirectRoute {rule}; make it a GuardedRoute")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        guard = self.guard()
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint

        async def handle(request: Request) -> Response:
            caller = await guard.admit(request)
            parts = await get_parts(request)
            return await endpoint(request=request, caller=caller, service=parts.lookup)

        return handle
