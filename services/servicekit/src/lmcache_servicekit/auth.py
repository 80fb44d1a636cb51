"""Authentication, authorisation and rate limits: the dependencies of routes under `/v1`, and the
route class that evaluates them first.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from lmcache_core.security import Principal, Role

from lmcache_servicekit.audit import begin_audit, note_body
from lmcache_servicekit.errors import PermissionDeniedError
from lmcache_servicekit.state import service_state

_bearer = HTTPBearer(
    auto_error=False,
    description="A token in the service's token file; not needed if none is configured. `client` at"
    " a call stands for any role.",
)
_SCOPE_KEY: Final = "lmcache.principal"
MAX_SHOWN_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class RoleRequired:
    """A dependency of a `GuardedRoute` that admits callers with a role, or with `admin`, and
    returns the caller.

    Calls that need `admin` and change something are written to the audit log, whatever the result.
    """

    role: Role

    async def __call__(
        self,
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Principal:
        """Return the caller that `GuardedRoute` has admitted."""
        principal: Principal = request.scope[_SCOPE_KEY]
        return principal

    async def admit(self, request: Request) -> Principal:
        """Authenticate and authorise the caller. Called once for each request.

        Raises:
            AuthenticationError: The token is missing or unknown.
            PermissionDeniedError: The role is not sufficient, or the tenant is another one.
            ThrottledError: The tenant exceeds its rate.
        """
        credentials = await _bearer(request)
        state = service_state(request.app)
        entry = begin_audit(request) if self.role == "admin" else None
        principal = state.tokens.authenticate(
            None if credentials is None else credentials.credentials
        )
        if entry is not None:
            entry.principal = principal
        state.admit(principal.tenant)
        if principal.role != "admin":
            if self.role == "admin":
                raise PermissionDeniedError("this call needs a token with the role admin")
            if state.settings.only_tenant not in (None, principal.tenant):
                raise PermissionDeniedError("this service belongs to another tenant")
        if entry is not None:
            await note_body(request, entry)
        request.scope[_SCOPE_KEY] = principal
        return principal


class GuardedRoute(APIRoute):
    """A route that admits its caller before anything of the request is read, so that others do not
    learn what a valid request would be. Unknown query parameters are refused.

    FastAPI parses a body before it evaluates dependencies. A route whose endpoint and router
    require no role is refused when it is created, so that none can forget it; `create_service_app`
    accepts no other routes.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that first admits the caller, then answers."""
        guard = self.guard()
        answer = super().get_route_handler()
        known = frozenset(_query_parameters(self.dependant))

        async def handle(request: Request) -> Response:
            await guard.admit(request)
            refuse_unknown_parameters(request, known)
            return await answer(request)

        return handle

    def guard(self) -> RoleRequired:
        """Return the strictest guard among those of endpoint and router."""
        asked = {required.role: required for required in _required(self.dependant)}
        if not asked:
            raise TypeError(
                f"{self.path}: its endpoint takes neither ClientPrincipal nor AdminPrincipal, so"
                " that anyone could call it"
            )
        return asked.get("admin") or asked["client"]


def refuse_unknown_parameters(request: Request, known: frozenset[str] = frozenset()) -> None:
    """Refuse unknown query parameters: a misspelt one would otherwise be ignored.

    Raises:
        RequestValidationError: A parameter is unknown.
    """
    if not request.scope["query_string"]:
        return
    unknown = dict.fromkeys(name for name in request.query_params if name not in known)
    if unknown:
        rule = f"unknown parameter; known: {', '.join(sorted(known)) or 'none'}"
        raise RequestValidationError(
            [
                {"type": "extra_forbidden", "loc": ("query", name[:MAX_SHOWN_CHARS]), "msg": rule}
                for name in unknown
            ]
        )


def _query_parameters(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for needed in dependant.dependencies:
        yield from _query_parameters(needed)


def _required(dependant: Dependant) -> Iterator[RoleRequired]:
    for needed in dependant.dependencies:
        if isinstance(needed.call, RoleRequired):
            yield needed.call
        yield from _required(needed)


STORAGE_KIND: Final = "storage"


def require_role_for(caller: Principal, kind: str) -> None:
    """Check that a caller may take a lease, or register, as an instance of that kind: clients as
    sidecars, the role `storage` as storage servers, admins as both.

    Others trust a storage server with the chunks of all tenants, or forget their own because it
    holds them.

    Raises:
        PermissionDeniedError: It may not.
    """
    if caller.role != "admin" and (caller.role == "storage") != (kind == STORAGE_KIND):
        needed = "storage" if kind == STORAGE_KIND else "client"
        raise PermissionDeniedError(
            f"kind={kind}: needs a token with the role {needed} (or admin), this one has"
            f" {caller.role}"
        )


ClientPrincipal = Annotated[Principal, Depends(RoleRequired("client"))]
AdminPrincipal = Annotated[Principal, Depends(RoleRequired("admin"))]
