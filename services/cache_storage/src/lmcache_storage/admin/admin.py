"""`/v1/stats` and `/v1/admin`: evict, clear, drain."""

from __future__ import annotations

from fastapi import APIRouter
from lmcache_node.admin import ClearAnswer, DrainAnswer, DrainView, EvictAnswer, EvictBytesRequest
from lmcache_node.settings import Tenant
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lmcache_storage.storage import RunningStorage


class StorageStats(BaseModel):
    """The storage at a glance."""

    instance: str
    advertise_url: str
    draining: bool
    settled: bool = Field(description="Whether everything stored has reached the disk and lookup")
    num_connections: int = Field(description="Open lm:// connections")
    tiers: dict[str, dict[str, int]]
    drain: DrainView
    replicas: list[str] | None = Field(
        description="The other instances, as they call themselves; null where none are configured"
    )
    reporter: dict[str, int] | None = Field(
        description="What lookup has been told; null without one"
    )


class ClearTenantRequest(BaseModel):
    """Whose chunks to forget: those of the caller's tenant where nothing is said."""

    model_config = ConfigDict(extra="forbid")

    tenant: Tenant | None = None
    all_tenants: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> ClearTenantRequest:
        if self.all_tenants and self.tenant is not None:
            raise ValueError("name one tenant or all_tenants, not both")
        return self


router = APIRouter(prefix="/v1", tags=["admin"], route_class=GuardedRoute)


@router.get("/stats")
async def stats(storage: RunningStorage, principal: ClientPrincipal) -> StorageStats:
    """Show a summary."""
    return StorageStats(
        instance=storage.settings.instance_id,
        advertise_url=storage.distributed_url,
        draining=storage.drain.has_begun,
        settled=storage.is_settled,
        num_connections=storage.lm_server.num_connections,
        tiers=storage.stack.stats(),
        drain=DrainView.model_validate(storage.drain.progress),
        replicas=None if storage.servers is None else sorted(storage.servers.known()),
        reporter=None if storage.reporter is None else storage.reporter.stats,
    )


@router.post("/admin/evict")
async def evict(
    storage: RunningStorage, principal: AdminPrincipal, request: EvictBytesRequest
) -> EvictAnswer:
    """Free host memory, coldest chunks first. The disk keeps its copies."""
    return EvictAnswer(freed_bytes=await storage.stack.hot.evict(request.num_bytes))


@router.post("/admin/clear")
async def clear(
    storage: RunningStorage, principal: AdminPrincipal, request: ClearTenantRequest | None = None
) -> ClearAnswer:
    """Remove the chunks of one tenant (default: the caller's) or of all."""
    wanted = request or ClearTenantRequest()
    tenant = None if wanted.all_tenants else wanted.tenant or principal.tenant
    return ClearAnswer(num_chunks=await storage.stack.clear(tenant))


@router.post("/admin/drain")
async def drain(
    storage: RunningStorage, principal: AdminPrincipal, wait: bool = True
) -> DrainAnswer:
    """Drain: become unready, accept no new chunks, finish writes, hand over all chunks.

    Reads continue.
    """
    storage.drain.begin()
    if wait:
        await storage.drain.run()
    return DrainAnswer(
        draining=True,
        settled=not storage.stack.is_writing,
        drain=DrainView.model_validate(storage.drain.progress),
    )
