"""Who is calling, whether it may, and how often: the dependencies that routes under `/v1` take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from lmcache_core.security import Principal, Role

from lmcache_servicekit.audit import begin_audit, note_body
from lmcache_servicekit.errors import PermissionDeniedError
from lmcache_servicekit.state import service_state

_bearer = HTTPBearer(auto_error=False, description="A token of the service's token file; none is needed where none is configured.")


def require_role(role: Role) -> Callable[..., Awaitable[Principal]]:
    """A dependency that lets in callers with `role`, or with `admin`, and returns who they are.

    The returned dependency raises `AuthenticationError` for a missing or unknown token, `PermissionDeniedError` for a lesser role or
    another tenant's, and `ThrottledError` where the tenant asks too often. What needs `admin` and changes something is written to the
    audit log, whatever becomes of it.
    """

    async def authenticate(request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Principal:
        state = service_state(request.app)
        entry = begin_audit(request) if role == "admin" else None
        principal = state.tokens.authenticate(None if credentials is None else credentials.credentials)
        if entry is not None:
            entry.principal = principal
        state.admit(principal.tenant)
        if principal.role != "admin":
            if role == "admin":
                raise PermissionDeniedError("this call needs a token with the role admin")
            if state.only_tenant not in (None, principal.tenant):
                raise PermissionDeniedError("this service belongs to another tenant")
        if entry is not None:
            await note_body(request, entry)
        return principal

    return authenticate


_authenticate_client = require_role("client")


async def client_of(request: Request) -> Principal:
    """What `ClientPrincipal` gives, for routes that take their parts by themselves. Raises as `require_role` says."""
    return await _authenticate_client(request, await _bearer(request))


ClientPrincipal = Annotated[Principal, Depends(_authenticate_client)]
AdminPrincipal = Annotated[Principal, Depends(require_role("admin"))]
