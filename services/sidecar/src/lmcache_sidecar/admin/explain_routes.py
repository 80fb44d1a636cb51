"""`/v1/explain`: where chunks are, and why they are missing."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from lmcache_servicekit.auth import GuardedRoute, require_role

from lmcache_sidecar.admin import explain_schemas as schemas
from lmcache_sidecar.admin.explain_views import explain_all
from lmcache_sidecar.dependencies import Parts

router = APIRouter(
    prefix="/v1",
    tags=["explain"],
    dependencies=[Depends(require_role("admin"))],
    route_class=GuardedRoute,
)


@router.post("/explain", summary="Where chunks are, and why they are missing")
async def explain(parts: Parts, request: schemas.ExplainRequest) -> schemas.ExplainAnswer:
    """Asks every tier, for a bounded time, without counting it as a read.

    Served on loopback only (403 elsewhere): token ids leave neither the pod nor any trace in logs.
    409 before an engine has said how KV is named.
    """
    parts.require_loopback()
    return await explain_all(parts, request)
