"""`/v1/stats` and `/v1/admin`: evict, clear, drain."""

from __future__ import annotations

from fastapi import APIRouter
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute

from lmcache_storage.admin.schemas import (
    ClearAnswer,
    ClearRequest,
    DrainAnswer,
    DrainView,
    EvictAnswer,
    EvictRequest,
    Stats,
)
from lmcache_storage.dependencies import Parts

router = APIRouter(prefix="/v1", tags=["admin"], route_class=GuardedRoute)


@router.get("/stats")
async def stats(parts: Parts, principal: ClientPrincipal) -> Stats:
    """The storage at a glance."""
    return Stats(
        instance=parts.instance,
        advertise_url=parts.advertise_url,
        draining=not parts.chunks.gate.is_open(),
        settled=parts.is_settled,
        num_connections=parts.lm_server.num_connections,
        tiers=parts.stack.stats(),
        drain=DrainView.of(parts.drain),
        replicas=None if parts.neighbours is None else sorted(parts.neighbours.known()),
        reporter=None if parts.reporter is None else parts.reporter.stats,
    )


@router.post("/admin/evict")
async def evict(parts: Parts, principal: AdminPrincipal, request: EvictRequest) -> EvictAnswer:
    """Free host memory, in the order of the eviction policy. What is on disk stays."""
    return EvictAnswer(freed_bytes=await parts.stack.hot.evict(request.num_bytes))


@router.post("/admin/clear")
async def clear(
    parts: Parts, principal: AdminPrincipal, request: ClearRequest | None = None
) -> ClearAnswer:
    """Forget the chunks of one tenant (the caller's by default), or of all."""
    wanted = request or ClearRequest()
    tenant = None if wanted.all_tenants else wanted.tenant or principal.tenant
    return ClearAnswer(num_chunks=await parts.stack.clear(tenant))


@router.post("/admin/drain")
async def drain(parts: Parts, principal: AdminPrincipal, wait: bool = True) -> DrainAnswer:
    """Take no new chunks, become unready, write what is pending and hand all chunks to the other
    instances (bounded). Reads go on.
    """
    parts.drain.begin()
    if wait:
        await parts.drain.run()
    return DrainAnswer(
        draining=True, settled=not parts.stack.is_writing, drain=DrainView.of(parts.drain)
    )
