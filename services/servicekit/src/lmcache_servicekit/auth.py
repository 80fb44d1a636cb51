"""Who is calling: the dependencies that routes under `/v1` take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from lmcache_core.security import Principal, Role

from lmcache_servicekit.errors import PermissionDeniedError
from lmcache_servicekit.state import service_state

_bearer = HTTPBearer(auto_error=False, description="A token of the service's token file; none is needed where none is configured.")


def require_role(role: Role) -> Callable[..., Awaitable[Principal]]:
    """A dependency that lets in callers with `role`, or with `admin`, and returns who they are.

    The returned dependency raises `AuthenticationError` for a missing or unknown token and `PermissionDeniedError` for a lesser role.
    """

    async def authenticate(request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Principal:
        token = None if credentials is None else credentials.credentials
        principal = service_state(request.app).tokens.authenticate(token)
        if role == "admin" and principal.role != "admin":
            raise PermissionDeniedError("this call needs a token with the role admin")
        return principal

    return authenticate


ClientPrincipal = Annotated[Principal, Depends(require_role("client"))]
AdminPrincipal = Annotated[Principal, Depends(require_role("admin"))]
