"""`GET /v1/stats`, `POST /v1/admin/{evict,clear}`."""

from __future__ import annotations

from fastapi import APIRouter
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal

from lmcache_lookup.admin.schemas import EvictBody, EvictedBody, StatsBody
from lmcache_lookup.admin.service import read_stats
from lmcache_lookup.dependencies import Index

router = APIRouter(prefix="/v1", tags=["admin"])


@router.get("/stats", summary="Which index, and how much is in it")
async def stats(caller: ClientPrincipal, index: Index) -> StatsBody:
    """Figures of the caller's tenant."""
    return await read_stats(index, caller.tenant)


@router.post("/admin/evict", summary="Forget who holds chunks")
async def evict(body: EvictBody, caller: AdminPrincipal, index: Index) -> EvictedBody:
    """Only the index forgets; the instances keep the chunks and may announce them again."""
    return EvictedBody(num_evicted=await index.evict(caller.tenant, [bytes.fromhex(text) for text in body.chunk_ids]))


@router.post("/admin/clear", summary="Forget everything of a tenant", status_code=204)
async def clear(caller: AdminPrincipal, index: Index) -> None:
    """Instances of the caller's tenant are asked to announce what they hold again: a remedy for an index that is in doubt."""
    await index.clear(caller.tenant)
