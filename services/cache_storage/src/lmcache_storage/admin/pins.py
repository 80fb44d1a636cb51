"""`/v1/admin/pin`, `/v1/admin/unpin`, `/v1/admin/pins`: chunks that an operator keeps in memory."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from lmcache_core.storage.pin_board import MAX_PINNED_CHUNKS
from lmcache_node.admin import DEFAULT_TTL_S, PinnedBytes, Ttl, UnpinAnswer, pinned_bytes
from lmcache_node.settings import Tenant
from lmcache_servicekit.auth import AdminPrincipal, GuardedRoute
from pydantic import BaseModel, ConfigDict, Field

from lmcache_storage.chunks.schemas import UrlKey
from lmcache_storage.chunks.service import chunk_keys
from lmcache_storage.problems import DrainingError
from lmcache_storage.storage import RunningStorage

UrlKeys = Annotated[list[UrlKey], Field(min_length=1, max_length=MAX_PINNED_CHUNKS)]


class PinKeysRequest(BaseModel):
    """What to keep in memory, and for how long."""

    model_config = ConfigDict(extra="forbid")

    keys: UrlKeys
    ttl_s: Ttl = DEFAULT_TTL_S
    tenant: Tenant | None = Field(
        None, description="Whose chunks: those of the caller's tenant where nothing is said"
    )


class UnpinnedKey(BaseModel):
    """One chunk that is not kept."""

    key: str
    reason: str = Field(
        description="Why it is missing here, or `pin_bound`: too much is pinned already"
    )


class PinKeysAnswer(PinnedBytes):
    """What is kept now."""

    num_pinned: int = Field(description="Of the chunks asked for")
    not_pinned: list[UnpinnedKey]


class UnpinKeysRequest(BaseModel):
    """What to keep no longer."""

    model_config = ConfigDict(extra="forbid")

    keys: UrlKeys | None = Field(None, description="Without it, everything of the tenant")
    tenant: Tenant | None = Field(
        None, description="Whose chunks: those of the caller's tenant where nothing is said"
    )


class PinnedKey(BaseModel):
    """One chunk that is kept."""

    key: str
    tenant: str
    num_bytes: int
    expires_in_s: float


class PinnedKeys(PinnedBytes):
    """Everything that is kept, of all tenants."""

    pins: list[PinnedKey]


router = APIRouter(prefix="/v1/admin", tags=["pins"], route_class=GuardedRoute)


@router.post("/pin")
async def pin(
    storage: RunningStorage, principal: AdminPrincipal, request: PinKeysRequest
) -> PinKeysAnswer:
    """Pin chunks: load them into memory and protect them from eviction."""
    if storage.drain.has_begun:
        raise DrainingError("this instance is draining")
    keys = list(dict.fromkeys(chunk_keys(request.tenant or principal.tenant, request.keys)))
    reasons = await storage.pins.pin(keys, request.ttl_s)
    return PinKeysAnswer(
        num_pinned=len(keys) - len(reasons),
        not_pinned=[
            UnpinnedKey(key=key.key.to_url(), reason=reason) for key, reason in reasons.items()
        ],
        **pinned_bytes(storage.pins),
    )


@router.post("/unpin")
async def unpin(
    storage: RunningStorage, principal: AdminPrincipal, request: UnpinKeysRequest | None = None
) -> UnpinAnswer:
    """Unpin chunks."""
    wanted = request or UnpinKeysRequest(keys=None, tenant=None)
    tenant = wanted.tenant or principal.tenant
    held = [pinned.key for pinned in storage.pins.pins() if pinned.key.tenant == tenant]
    return UnpinAnswer(
        num_unpinned=storage.pins.unpin(
            held if wanted.keys is None else chunk_keys(tenant, wanted.keys)
        )
    )


@router.get("/pins")
async def pins(storage: RunningStorage, principal: AdminPrincipal) -> PinnedKeys:
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
