"""`GET /v1/{stats,tenants}`, `POST /v1/admin/{evict,clear}`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute

from lmcache_lookup.admin.schemas import (
    EVICT,
    MAX_TENANTS_PER_ANSWER,
    EvictedAnswer,
    StatsAnswer,
    TenantsAnswer,
)
from lmcache_lookup.admin.service import read_stats, read_tenants, tenant_for
from lmcache_lookup.dependencies import Index
from lmcache_lookup.formats import answered
from lmcache_lookup.openapi import documented
from lmcache_lookup.schemas import TenantInQuery

router = APIRouter(prefix="/v1", tags=["admin"], route_class=GuardedRoute)

Limit = Annotated[int, Query(ge=1, le=MAX_TENANTS_PER_ANSWER)]


@router.get(
    "/stats", summary="Which index, and how much is in it", **documented(answer=StatsAnswer)
)
async def stats(
    request: Request, caller: ClientPrincipal, index: Index, tenant: TenantInQuery | None = None
) -> Response:
    """Figures of the caller's tenant, or of the one that an admin names."""
    return answered(request, await read_stats(index, tenant_for(caller, tenant)))


@router.get("/tenants", summary="Whose chunks are in the index", **documented(answer=TenantsAnswer))
async def tenants(
    request: Request,
    caller: AdminPrincipal,
    index: Index,
    after: TenantInQuery | None = None,
    limit: Limit = MAX_TENANTS_PER_ANSWER,
) -> Response:
    """A page of names, behind `after`."""
    return answered(request, await read_tenants(index, after or "", limit))


@router.post("/admin/evict", summary="Forget who holds chunks", **documented(EVICT, EvictedAnswer))
async def evict(request: Request, caller: AdminPrincipal, index: Index) -> Response:
    """Only the index forgets; the instances keep the chunks and may announce them again."""
    body = await EVICT.read(request)
    return answered(
        request, EvictedAnswer(await index.evict(tenant_for(caller, body.tenant), body.ids))
    )


@router.post("/admin/clear", summary="Forget everything of a tenant", status_code=204)
async def clear(caller: AdminPrincipal, index: Index, tenant: TenantInQuery | None = None) -> None:
    """Instances of the tenant are asked to announce what they hold again: a remedy for an index
    that is in doubt.
    """
    await index.clear(tenant_for(caller, tenant))
