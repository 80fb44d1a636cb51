"""`/v1/admin/pin`, `/v1/admin/unpin`, `/v1/admin/pins`: chunks that an operator keeps in memory."""

from __future__ import annotations

from fastapi import APIRouter
from lmcache_servicekit.auth import AdminPrincipal, GuardedRoute

from lmcache_storage.admin import pin_schemas as schemas
from lmcache_storage.chunks.service import chunk_keys
from lmcache_storage.dependencies import Parts
from lmcache_storage.problems import DrainingError

router = APIRouter(prefix="/v1/admin", tags=["pins"], route_class=GuardedRoute)


@router.post("/pin")
async def pin(
    parts: Parts, principal: AdminPrincipal, request: schemas.PinRequest
) -> schemas.PinAnswer:
    """Lift chunks from disk that are not in memory, and keep them from being evicted for a
    while.
    """
    if not parts.chunks.gate.is_open():
        raise DrainingError("this instance is draining")
    keys = list(dict.fromkeys(chunk_keys(request.tenant or principal.tenant, request.keys)))
    reasons = await parts.pins.pin(keys, request.ttl_s)
    return schemas.PinAnswer(
        num_pinned=len(keys) - len(reasons),
        not_pinned=[
            schemas.Unpinned(key=key.key.to_url(), reason=reason) for key, reason in reasons.items()
        ],
        pinned_bytes=parts.pins.num_bytes,
        max_pinned_bytes=parts.pins.max_bytes,
    )


@router.post("/unpin")
async def unpin(
    parts: Parts, principal: AdminPrincipal, request: schemas.UnpinRequest | None = None
) -> schemas.UnpinAnswer:
    """They are evicted when their turn comes."""
    wanted = request or schemas.UnpinRequest(keys=None, tenant=None)
    tenant = wanted.tenant or principal.tenant
    held = [pinned.key for pinned in parts.pins.pins() if pinned.key.tenant == tenant]
    return schemas.UnpinAnswer(
        num_unpinned=parts.pins.unpin(
            held if wanted.keys is None else chunk_keys(tenant, wanted.keys)
        )
    )


@router.get("/pins")
async def pins(parts: Parts, principal: AdminPrincipal) -> schemas.Pins:
    """What is kept in memory, and for how long yet."""
    return schemas.Pins(
        pins=[schemas.PinView.of(pinned) for pinned in parts.pins.pins()],
        pinned_bytes=parts.pins.num_bytes,
        max_pinned_bytes=parts.pins.max_bytes,
    )
