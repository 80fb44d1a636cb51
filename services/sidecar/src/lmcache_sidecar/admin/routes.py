"""`/v1`: status, tiers, clients, chunks; evict, clear, drain. Pins and explanations have files
of their own.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from lmcache_core.storage.local_store import LOCAL_TIERS
from lmcache_servicekit.auth import GuardedRoute, require_role

from lmcache_sidecar.admin import schemas, views
from lmcache_sidecar.dependencies import Parts

MAX_PAGE = 1000

router = APIRouter(prefix="/v1", tags=["admin"], route_class=GuardedRoute)
client_role = Depends(require_role("client"))
admin_role = Depends(require_role("admin"))


@router.get("/status", dependencies=[client_role])
async def status(parts: Parts) -> schemas.Status:
    """The sidecar at a glance."""
    return views.status_of(parts)


@router.get("/tiers", dependencies=[client_role])
async def tiers(parts: Parts) -> schemas.Tiers:
    """Figures by tier."""
    return schemas.Tiers(tiers=parts.stack.stats())


@router.get("/clients", dependencies=[client_role])
async def clients(parts: Parts) -> schemas.Clients:
    """Clients of the socket that are connected now."""
    return views.clients_of(parts)


@router.get("/chunks", dependencies=[admin_role])
async def chunks(
    parts: Parts,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> schemas.Chunks:
    """A page of the chunks in shared memory."""
    keys = await asyncio.to_thread(parts.stack.hot.keys)
    end = offset + limit
    page = [key.key.to_url() for key in keys[offset:end]]
    return schemas.Chunks(chunks=page, next_offset=end if end < len(keys) else None)


@router.post("/evict", dependencies=[admin_role])
async def evict(parts: Parts, request: schemas.EvictRequest) -> schemas.EvictAnswer:
    """Free shared memory, in the order of the eviction policy."""
    return schemas.EvictAnswer(freed_bytes=await parts.stack.hot.evict(request.num_bytes))


@router.post("/clear", dependencies=[admin_role])
async def clear(parts: Parts, request: schemas.ClearRequest | None = None) -> schemas.ClearAnswer:
    """Forget every chunk of this sidecar's own tiers, or of those named."""
    tiers = None if request is None else request.tiers
    return schemas.ClearAnswer(
        num_chunks=await parts.clear(LOCAL_TIERS if tiers is None else tiers)
    )


@router.post("/drain", dependencies=[admin_role])
async def drain(parts: Parts, wait: bool = True) -> schemas.DrainAnswer:
    """Take no new stores, ask for no new pulls, finish pending writes, and hand on what only this
    sidecar holds.

    Reads go on. The answer comes when that is done, or its time (`drain_timeout_s`) over; with
    `wait=false` at once, and `GET /v1/status` tells how far it is.
    """
    parts.drain.begin()
    await (parts.drain.run() if wait else parts.drain.counted())
    progress = schemas.DrainView.model_validate(parts.drain.progress)
    return schemas.DrainAnswer(draining=True, settled=parts.is_settled, drain=progress)
