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
from lmcache_servicekit.bodies import ApiModel
from lmcache_servicekit.problems import failures
from pydantic import ConfigDict, Field, model_validator

from lmcache_storage.chunks import UrlKey, chunk_key
from lmcache_storage.problems import DrainingError
from lmcache_storage.storage import RunningStorage, StorageNode

UrlKeys = Annotated[list[UrlKey], Field(min_length=1, max_length=MAX_PINNED_CHUNKS)]
ChunksTenant = Annotated[
    Tenant | None, Field(description="Tenant of the chunks; null: the caller's.")
]


class StorageStats(ApiModel):
    """The storage at a glance."""

    instance: str
    """Id of this instance at lookup and broker."""
    advertise_url: str
    """Where others reach its lm:// port."""
    draining: bool
    """Whether a drain has begun here, or the broker sends no pulls here."""
    settled: bool
    """Whether everything stored has reached the slower tiers and lookup."""
    num_connections: int
    """Open lm:// connections."""
    tiers: dict[str, dict[str, int]]
    """Figures of each tier, by its name: `num_chunks`, `used_bytes`, `capacity_bytes` and the
    tier's own counters since the start. A bucket's sizes are 0, since it does not say.
    """
    drain: DrainView
    """Progress of its drain."""
    replicas: list[str] | None
    """Names of the other storage servers that are known now; null if none are configured."""
    reporter: dict[str, int] | None
    """The reports to lookup: the incarnation, events not acknowledged, resyncs, overflows, and
    whether it is registered (1 or 0); null without lookup.
    """


class ClearTenantRequest(ApiModel):
    """The tenant to clear."""

    model_config = ConfigDict(extra="forbid")

    tenant: Tenant | None = None
    """Its name; null: the caller's, unless `all_tenants` is set."""
    all_tenants: bool = False
    """Clear every tenant; not together with `tenant`."""

    @model_validator(mode="after")
    def _check_one(self) -> ClearTenantRequest:
        if self.all_tenants and self.tenant is not None:
            raise ValueError("name one tenant or all_tenants, not both")
        return self


class PinKeysRequest(ApiModel):
    """Chunks to pin in memory, and for how long."""

    model_config = ConfigDict(extra="forbid")

    keys: UrlKeys
    """Keys in the URL form; repeated ones count once."""
    ttl_s: Ttl = DEFAULT_TTL_S
    tenant: ChunksTenant = None


class UnpinnedKey(ApiModel):
    """One chunk that was not pinned."""

    key: str
    """Its key in the URL form."""
    reason: str
    """Why a read missed it, for example `never_stored`, `evicted` or `no_memory`; or `pin_bound`:
    too much is pinned already.
    """


class PinKeysAnswer(PinnedBytes):
    """The pins after a request."""

    num_pinned: int
    """How many of the requested chunks are pinned now."""
    not_pinned: list[UnpinnedKey]
    """The other ones."""


class UnpinKeysRequest(ApiModel):
    """Chunks to unpin."""

    model_config = ConfigDict(extra="forbid")

    keys: UrlKeys | None = None
    """Keys in the URL form; null: all pinned chunks of the tenant."""
    tenant: ChunksTenant = None


class PinnedKey(ApiModel):
    """One pinned chunk."""

    key: str
    """Its key in the URL form."""
    tenant: str
    """The tenant that owns it."""
    num_bytes: int
    """Memory that it takes, in bytes."""
    expires_in_s: float
    """Seconds until its pin ends."""


class PinnedKeys(PinnedBytes):
    """All pinned chunks, of all tenants."""

    pins: list[PinnedKey]
    """One for each chunk."""


router = APIRouter(prefix="/v1", route_class=GuardedRoute)


@router.get("/stats", tags=["status"])
async def get_stats(storage: RunningStorage, principal: ClientPrincipal) -> StorageStats:
    """Show a summary.

    Of the whole server, whatever the caller's tenant.
    """
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
    """Free host memory, coldest chunks first. Of any tenant; pinned chunks and those in use stay,
    and slower tiers keep their copies.
    """
    return EvictAnswer(freed_bytes=await storage.stack.hot.evict(request.num_bytes))


@router.post("/admin/clear", tags=["admin"])
async def clear_tenant(
    storage: RunningStorage, principal: AdminPrincipal, request: ClearTenantRequest | None = None
) -> ClearAnswer:
    """Remove the chunks of one tenant (default: the caller's) or of all.

    From every tier of this server, its bucket included; pins of removed chunks end. It cannot be
    undone. Other servers keep their chunks. Without a body: the caller's tenant.
    """
    wanted = request or ClearTenantRequest()
    tenant = None if wanted.all_tenants else wanted.tenant or principal.tenant
    return ClearAnswer(num_chunks=await storage.stack.clear(tenant))


@router.post("/admin/drain", tags=["admin"])
async def drain(
    storage: RunningStorage, principal: AdminPrincipal, wait: Wait = True
) -> DrainAnswer:
    """Drain: become unready, accept no new chunks, finish writes, hand over all chunks.

    Reads continue; stores get 503 and pins end. A call during a drain waits for that drain; after
    an incomplete one it tries again. The process keeps running, and `undrain` cancels the drain.
    """
    storage.drain.begin()
    if wait:
        await storage.drain.run()
    return _drain_answer(storage)


@router.post("/admin/undrain", tags=["admin"], responses=failures(409))
async def undrain(storage: RunningStorage, principal: AdminPrincipal) -> DrainAnswer:
    """Cancel a drain: become ready, accept chunks, pins and pulls again.

    One that the broker has ordered, too. Chunks that were handed over also stay there; earlier
    pins are gone. Does nothing without a drain. 409: the process is about to end.
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
    """Pin chunks: load them into memory and protect them from eviction.

    Until `ttl_s` has passed, or an unpin, drain or restart. The answer names those that were not
    pinned. 400: a key cannot be read. 503: the server drains.
    """
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
    """Unpin chunks.

    They stay in memory until they are evicted. Without a body: all of the caller's tenant. Chunks
    that are not pinned are ignored. 400: a key cannot be read.
    """
    wanted = request or UnpinKeysRequest(keys=None, tenant=None)
    tenant = wanted.tenant or principal.tenant
    if wanted.keys is None:
        keys = [pinned.key for pinned in storage.pins.pins() if pinned.key.tenant == tenant]
    else:
        keys = [chunk_key(tenant, key) for key in wanted.keys]
    return UnpinAnswer(num_unpinned=storage.pins.unpin(keys))


@router.get("/admin/pins", tags=["pins"])
async def list_pins(storage: RunningStorage, principal: AdminPrincipal) -> PinnedKeys:
    """List pins and their remaining time.

    Those of every tenant, in no order.
    """
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
