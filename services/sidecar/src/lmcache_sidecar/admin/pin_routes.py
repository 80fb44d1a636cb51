"""`/v1/pin`, `/v1/unpin`, `/v1/pins`: chunks that an operator keeps hot."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from lmcache_servicekit.auth import GuardedRoute, require_role

from lmcache_sidecar.admin import pin_schemas as schemas
from lmcache_sidecar.admin.pin_views import pins_of, unpinned
from lmcache_sidecar.dependencies import Parts
from lmcache_sidecar.descriptions import namers

router = APIRouter(
    prefix="/v1",
    tags=["pins"],
    dependencies=[Depends(require_role("admin"))],
    route_class=GuardedRoute,
)


@router.post("/pin", summary="Keep chunks hot for a while")
async def pin(parts: Parts, request: schemas.PinRequest) -> schemas.PinAnswer:
    """Lift chunks that are not hot, and keep them from being evicted. 409 before an engine has
    said how KV is named, and in a drain.
    """
    parts.require_serving()
    hashes, known = request.chunk_hashes, parts.descriptions.of(request.model)
    able = namers(parts.settings.tenant, known, lambda namer: namer.check_chunks(len(hashes)))
    chunks = [namer.of_hashes(hashes) for _, namer in able]
    keys = list(
        dict.fromkeys(key for of_model in chunks for chunk in of_model for key in chunk.keys)
    )
    reasons = await parts.pins.pin(keys, request.ttl_s)
    return schemas.PinAnswer(
        num_pinned=len(keys) - len(reasons),
        not_pinned=unpinned(chunks, reasons),
        pinned_bytes=parts.pins.num_bytes,
        max_pinned_bytes=parts.pins.max_bytes,
    )


@router.post("/unpin", summary="Keep chunks no longer")
async def unpin(parts: Parts, request: schemas.UnpinRequest | None = None) -> schemas.UnpinAnswer:
    """They are evicted when their turn comes."""
    chunk_hashes = (
        None if request is None or request.chunk_hashes is None else frozenset(request.chunk_hashes)
    )
    return schemas.UnpinAnswer(num_unpinned=parts.pins.unpin_hashes(chunk_hashes))


@router.get("/pins", summary="What is kept hot")
async def pins(parts: Parts) -> schemas.Pins:
    """And for how long yet."""
    return pins_of(parts.pins)
