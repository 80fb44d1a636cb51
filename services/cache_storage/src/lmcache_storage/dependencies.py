"""What routes ask for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Request
from lmcache_core.wire.capabilities import Accepts

from lmcache_storage.chunks.service import ChunkService
from lmcache_storage.parts import StorageParts


async def storage_parts(request: Request) -> StorageParts:
    """The running storage, which the lifespan has put into the app."""
    parts = request.app.state.storage
    assert isinstance(parts, StorageParts)
    return parts


Parts = Annotated[StorageParts, Depends(storage_parts)]

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


async def chunk_service(parts: Parts, accept: AcceptHeader = "") -> ChunkService:
    """The chunks, as the caller wants to see them."""
    words = {word.strip().lower() for word in accept.split(",")}
    return parts.chunks.for_client(Accepts(lossy=LOSSLESS not in words))


Chunks = Annotated[ChunkService, Depends(chunk_service)]
