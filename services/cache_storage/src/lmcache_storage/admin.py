"""`/v1/stats` and `/v1/admin`: evict, clear, drain, and pin chunks in memory."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from lmcache_core.storage.pin_board import MAX_PINNED_CHUNKS
from lmcache_node.admin import (
    DEFAULT_TTL_S,
    ClearAnswer,
    DrainAnswer,
    DrainView,
    EvictAnswer,
    EvictBytesRequest,
    PinnedBytes,
    Ttl,
    UnpinAnswer,
    Wait,
    pinned_bytes,
)
from lmcache_node.settings import Tenant
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute
from lmcache_servicekit.problems import failures
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lmcache_storage.chunks import UrlKey, chunk_key
from lmcache_storage.problems import DrainingError
from lmcache_storage.storage import RunningStorage, StorageNode

UrlKeys = Annotated[list[UrlKey], Field(min_length=1, max_length=MAX_PINNED_CHUNKS)]


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
        description="Names of the other instances; null if none are configured"
    )
    reporter: dict[str, int] | None = Field(
        description="State of the reports to lookup; null without lookup"
    )


class ClearTenantRequest(BaseModel):
    """The tenant to clear; by default the caller's."""

    model_config = ConfigDict(extra="forbid")

    tenant: Tenant | None = None
    all_tenants: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> ClearTenantRequest:
        if self.all_tenants and self.tenant is not None:
            raise ValueError("name one tenant or all_tenants, not both")
        return self


class PinKeysRequest(BaseModel):
    """Chunks to pin in memory, and for how long."""

    model_config = ConfigDict(extra="forbid")

    keys: UrlKeys
    ttl_s: Ttl = DEFAULT_TTL_S
    tenant: Tenant | None = Field(None, description="Tenant of the chunks; by default the caller's")


class UnpinnedKey(BaseModel):
    """One chunk that was not pinned."""

    key: str
    reason: str = Field(
        description="Why it is missing here, or `pin_bound`: too much is pinned already"
    )


class PinKeysAnswer(PinnedBytes):
    """The pins after a request."""

    num_pinned: int = Field(description="How many of the requested chunks are pinned")
    not_pinned: list[UnpinnedKey]


class UnpinKeysRequest(BaseModel):
    """Chunks to unpin."""

    model_config = ConfigDict(extra="forbid")

    keys: UrlKeys | None = Field(None, description="If absent, all chunks of the tenant")
    tenant: Tenant | None = Field(None, description="Tenant of the chunks; by default the caller's")


class PinnedKey(BaseModel):
    """One pinned chunk."""

    key: str
    tenant: str
    num_bytes: int
    expires_in_s: float


class PinnedKeys(PinnedBytes):
    """All pinned chunks, of all tenants."""

    pins: list[PinnedKey]


router = APIRouter(prefix="/v1", route_class=GuardedRoute)


@router.get("/stats", tags=["status"])
async def get_stats(storage: RunningStorage, principal: ClientPrincipal) -> StorageStats:
    """Show a summary."""
    return StorageStats(
        instance=storage.settings.instance_id,
        advertise_url=storage.distributed_url,
        draining=storage.is_draining,
        settled=storage.is_settled,
        num_connections=storage.lm_server.num_connections,
        tiers=storage.stack.stats(),
        drain=DrainView.model_validate(storage.drain.progress),
        replicas=None if storage.servers is None else sorted(storage.servers.known()),
        reporter=None if storage.reporter is None else storage.reporter.stats,
    )


@router.post("/admin/evict", tags=["admin"])
async def evict_memory(
    storage: RunningStorage, principal: AdminPrincipal, request: EvictBytesRequest
) -> EvictAnswer:
    """Free host memory, coldest chunks first. The disk keeps its copies."""
    return EvictAnswer(freed_bytes=await storage.stack.hot.evict(request.num_bytes))


@router.post("/admin/clear", tags=["admin"])
async def clear_tenant(
    storage: RunningStorage, principal: AdminPrincipal, request: ClearTenantRequest | None = None
) -> ClearAnswer:
    """Remove the chunks of one tenant (default: the caller's) or of all."""
    wanted = request or ClearTenantRequest()
    tenant = None if wanted.all_tenants else wanted.tenant or principal.tenant
    return ClearAnswer(num_chunks=await storage.stack.clear(tenant))


@router.post("/admin/drain", tags=["admin"])
async def drain(
    storage: RunningStorage, principal: AdminPrincipal, wait: Wait = True
) -> DrainAnswer:
    """Drain: become unready, accept no new chunks, finish writes, hand over all chunks.

    Reads continue.
    """
    storage.drain.begin()
    if wait:
        await storage.drain.run()
    return _drain_answer(storage)


@router.post("/admin/undrain", tags=["admin"], responses=failures(409))
async def undrain(storage: RunningStorage, principal: AdminPrincipal) -> DrainAnswer:
    """Cancel a drain: become ready, accept chunks, pins and pulls again.

    Chunks that were handed over stay there. 409 while the process ends.
    """
    await storage.undrain()
    return _drain_answer(storage)


def _drain_answer(storage: StorageNode) -> DrainAnswer:
    return DrainAnswer(
        draining=storage.is_draining,
        settled=not storage.stack.is_writing,
        drain=DrainView.model_validate(storage.drain.progress),
    )


@router.post("/admin/pin", tags=["pins"], responses=failures(400, 503))
async def pin_chunks(
    storage: RunningStorage, principal: AdminPrincipal, request: PinKeysRequest
) -> PinKeysAnswer:
    """Pin chunks: load them into memory and protect them from eviction."""
    if storage.drain.has_begun:
        raise DrainingError("this instance is draining")
    tenant = request.tenant or principal.tenant
    keys = [chunk_key(tenant, key) for key in dict.fromkeys(request.keys)]
    reasons = await storage.pins.pin(keys, request.ttl_s)
    return PinKeysAnswer(
        num_pinned=len(keys) - len(reasons),
        not_pinned=[
            UnpinnedKey(key=key.key.to_url(), reason=reason) for key, reason in reasons.items()
        ],
        **pinned_bytes(storage.pins),
    )


@router.post("/admin/unpin", tags=["pins"], responses=failures(400))
async def unpin_chunks(
    storage: RunningStorage, principal: AdminPrincipal, request: UnpinKeysRequest | None = None
) -> UnpinAnswer:
    """Unpin chunks."""
    wanted = request or UnpinKeysRequest(keys=None, tenant=None)
    tenant = wanted.tenant or principal.tenant
    if wanted.keys is None:
        keys = [pinned.key for pinned in storage.pins.pins() if pinned.key.tenant == tenant]
    else:
        keys = [chunk_key(tenant, key) for key in wanted.keys]
    return UnpinAnswer(num_unpinned=storage.pins.unpin(keys))


@router.get("/admin/pins", tags=["pins"])
async def list_pins(storage: RunningStorage, principal: AdminPrincipal) -> PinnedKeys:
    """List pins and their remaining time."""
    return PinnedKeys(
        pins=[
            PinnedKey(
                key=pinned.key.key.to_url(),
                tenant=pinned.key.tenant,
                num_bytes=pinned.num_bytes,
                expires_in_s=round(pinned.expires_in_s, 3),
            )
            for pinned in storage.pins.pins()
        ],
        **pinned_bytes(storage.pins),
    )
