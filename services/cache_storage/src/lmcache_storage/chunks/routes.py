"""`/v1/chunks`: store, read, ask, remove, list. All in the namespace of the caller's tenant."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Response
from lmcache_core.wire.capabilities import Accepts
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_storage.chunks.bodies import RecordBody
from lmcache_storage.chunks.responses import RECORD_TYPE, RecordResponse, RecordsResponse
from lmcache_storage.chunks.schemas import (
    MAX_URL_KEY_CHARS,
    Keys,
    ListedChunk,
    ListedChunks,
    Present,
)
from lmcache_storage.chunks.service import ChunkService, chunk_keys
from lmcache_storage.storage import RunningStorage

MAX_PAGE = 1000

PathKey = Annotated[
    str, Path(max_length=MAX_URL_KEY_CHARS, description="The chunk's key in its URL spelling")
]
RECORD_CONTENT = {"content": {RECORD_TYPE: {"schema": {"type": "string", "format": "binary"}}}}

MAX_ACCEPT_CHARS = 256
LOSSLESS = "lossless"

AcceptHeader = Annotated[
    str,
    Header(
        alias="LMCache-Accept",
        max_length=MAX_ACCEPT_CHARS,
        description=(
            "`lossless`: records that were encoded with loss are not served, and give place to what"
            " is stored without. By default everything is served. A list with commas; words of"
            " later versions are passed over."
        ),
    ),
]


async def chunk_service(storage: RunningStorage, accept: AcceptHeader = "") -> ChunkService:
    """Return the chunks, as the caller wants to see them."""
    words = {word.strip().lower() for word in accept.split(",")}
    accepts = Accepts(lossy=LOSSLESS not in words)
    return ChunkService(
        storage.store.for_client(accepts),
        storage.near.for_client(accepts),
        storage.takes_chunks,
        storage.limits,
    )


Chunks = Annotated[ChunkService, Depends(chunk_service)]

router = APIRouter(prefix="/v1", tags=["chunks"], route_class=GuardedRoute)


@router.put(
    "/chunks/{key}",
    status_code=201,
    response_class=Response,
    openapi_extra={"requestBody": {"required": True, **RECORD_CONTENT}},
    responses={201: {"description": "Kept"}, 204: {"description": "It was here already"}},
)
async def put_chunk(
    key: PathKey, body: RecordBody, principal: ClientPrincipal, chunks: Chunks
) -> Response:
    """Store one verified record under its key."""
    is_new = await chunks.put(principal.tenant, key, body)
    return Response(status_code=201 if is_new else 204)


@router.get(
    "/chunks/{key}",
    response_class=Response,
    responses={200: {"description": "The record", **RECORD_CONTENT}},
)
async def get_chunk(key: PathKey, principal: ClientPrincipal, chunks: Chunks) -> Response:
    """Read one record."""
    return RecordResponse(await chunks.get(principal.tenant, key), chunks.limits)


@router.head("/chunks/{key}", response_class=Response)
async def head_chunk(key: PathKey, principal: ClientPrincipal, chunks: Chunks) -> Response:
    """Check whether one chunk exists."""
    await chunks.check(principal.tenant, key)
    response = Response(media_type=RECORD_TYPE)
    del response.headers["content-length"]
    return response


@router.delete("/chunks/{key}", status_code=204, response_class=Response)
async def delete_chunk(key: PathKey, principal: ClientPrincipal, chunks: Chunks) -> Response:
    """Remove one chunk."""
    await chunks.remove(principal.tenant, key)
    return Response(status_code=204)


@router.post("/chunks:contains")
async def contains(keys: Keys, principal: ClientPrincipal, chunks: Chunks) -> Present:
    """Check which chunks exist."""
    return Present(present=await chunks.contains(principal.tenant, keys.keys))


@router.post(
    "/chunks:get",
    response_class=Response,
    responses={200: {"description": "Records back to back", **RECORD_CONTENT}},
)
async def get_chunks(keys: Keys, principal: ClientPrincipal, chunks: Chunks) -> Response:
    """Read many records; missing ones are left out."""
    once = list(
        dict.fromkeys(keys.keys)
    )  # a short request must not ask for one record thousands of times
    return RecordsResponse(chunks.store, chunk_keys(principal.tenant, once), chunks.limits)


@router.get("/chunks")
async def list_chunks(
    principal: ClientPrincipal,
    storage: RunningStorage,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> ListedChunks:
    """List the caller's chunks by key."""
    end = offset + limit
    held, num_held = await storage.page(principal.tenant, offset, end)
    page = [
        ListedChunk(key=key.key.to_url(), size_bytes=size, tiers=tiers) for key, size, tiers in held
    ]
    return ListedChunks(chunks=page, next_offset=end if end < num_held else None)
