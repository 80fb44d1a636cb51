"""`/v1`: status, tiers, clients, chunks; evict, clear, drain."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from lmcache_servicekit.auth import require_role

from lmcache_sidecar.admin import schemas
from lmcache_sidecar.dependencies import Parts

MAX_PAGE = 1000

router = APIRouter(prefix="/v1", tags=["admin"])
client_role = Depends(require_role("client"))
admin_role = Depends(require_role("admin"))


@router.get("/status", dependencies=[client_role])
async def status(parts: Parts) -> schemas.Status:
    """The sidecar at a glance."""
    return schemas.Status(
        instance=parts.instance,
        distributed_url=parts.distributed_url,
        generation=f"{parts.arena.generation:016x}",
        arena_bytes=parts.arena.size,
        draining=parts.is_draining,
        num_clients=len(parts.socket_server.sessions),
        registered=parts.is_registered,
        settled=parts.is_settled,
    )


@router.get("/tiers", dependencies=[client_role])
async def tiers(parts: Parts) -> schemas.Tiers:
    """Figures by tier."""
    return schemas.Tiers(tiers=parts.stack.stats())


@router.get("/clients", dependencies=[client_role])
async def clients(parts: Parts) -> schemas.Clients:
    """Clients of the socket that are connected now."""
    return schemas.Clients(clients=[schemas.ClientStatus.model_validate(s.describe()) for s in parts.socket_server.sessions])


@router.get("/chunks", dependencies=[admin_role])
async def chunks(
    parts: Parts, offset: Annotated[int, Query(ge=0)] = 0, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100
) -> schemas.Chunks:
    """A page of the chunks in shared memory."""
    keys = parts.stack.hot.keys()
    end = offset + limit
    page = [key.key.to_url() for key in keys[offset:end]]
    return schemas.Chunks(chunks=page, next_offset=end if end < len(keys) else None)


@router.post("/evict", dependencies=[admin_role])
async def evict(parts: Parts, request: schemas.EvictRequest) -> schemas.EvictAnswer:
    """Free shared memory, in the order of the eviction policy."""
    return schemas.EvictAnswer(freed_bytes=parts.stack.hot.evict_bytes(request.num_bytes))


@router.post("/clear", dependencies=[admin_role])
async def clear(parts: Parts) -> schemas.ClearAnswer:
    """Forget every chunk of this sidecar's own tiers."""
    return schemas.ClearAnswer(num_chunks=await parts.clear())


@router.post("/drain", dependencies=[admin_role])
async def drain(parts: Parts) -> schemas.DrainAnswer:
    """Take no new stores, ask for no new pulls, and wait (bounded) until what is pending has been written."""
    await parts.drain.run()
    return schemas.DrainAnswer(draining=True, settled=parts.is_settled)
