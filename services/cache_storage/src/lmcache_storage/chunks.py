"""`/v1/chunks`: store, read, check, remove, list. All calls concern the caller's tenant."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from lmcache_core.errors import CapacityError, RecordError, SerdeError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.record import Chunk, Miss, MissReason, RecordReason
from lmcache_core.serde.stated_size import check_stated_size
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.served import ServedStore, ServerLimits
from lmcache_core.wire.stream import paced
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute
from lmcache_servicekit.bodies import ApiModel
from lmcache_servicekit.errors import NotFoundError
from lmcache_servicekit.problems import failures
from pydantic import ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from lmcache_storage.problems import DrainingError, RecordTooLargeError, SlowClientError
from lmcache_storage.record_stream import RecordStream
from lmcache_storage.storage import RunningStorage

logger = logging.getLogger(__name__)

RECORD_TYPE: Final = "application/vnd.lmcache.record"
SLICE_BYTES: Final = 128 << 10
"""Size of one copy. Larger copies cost several times as much: the system reclaims their memory and
clears it page by page.
"""
MAX_PAGE: Final = 1000
MAX_KEYS: Final = 4096
MAX_URL_KEY_CHARS: Final = 6000
MAX_ACCEPT_CHARS: Final = 256
LOSSLESS: Final = "lossless"
URL_FORM: Final = "its canonical bytes in base64url, unpadded"
RECORD_CONTENT: Final = {
    "content": {RECORD_TYPE: {"schema": {"type": "string", "format": "binary"}}}
}

UrlKey = Annotated[
    str,
    Field(min_length=1, max_length=MAX_URL_KEY_CHARS, description=f"A chunk's key: {URL_FORM}."),
]
PathKey = Annotated[
    str, Path(max_length=MAX_URL_KEY_CHARS, description=f"The chunk's key: {URL_FORM}.")
]
AcceptHeader = Annotated[
    str,
    Header(
        alias="LMCache-Accept",
        max_length=MAX_ACCEPT_CHARS,
        description=(
            "`lossless`: records that were encoded with loss are not served, and are replaced by"
            " what is stored without loss. By default everything is served. A list with commas;"
            " unknown words are ignored."
        ),
    ),
]


class Keys(ApiModel):
    """Chunks of the caller's tenant."""

    model_config = ConfigDict(extra="forbid")

    keys: list[UrlKey] = Field(max_length=MAX_KEYS)
    """Keys in the URL form; for reads, repeated ones count once."""


class Present(ApiModel):
    """Which of the chunks exist."""

    present: list[bool]
    """For each key of the request, in its order, whether a read would find the chunk now."""


class ListedChunk(ApiModel):
    """One chunk."""

    key: str
    """Its key in the URL form."""
    size_bytes: int
    """Size of its record in bytes."""
    tiers: list[str]
    """Names of the tiers in this process that have it, fastest first: `memory`, `disk`, `bucket`.
    """


class ListedChunks(ApiModel):
    """A page of the caller's chunks."""

    chunks: list[ListedChunk]
    """At most `limit`, ordered by key."""
    next_offset: int | None
    """The `offset` of the next page; null at the end."""


def chunk_key(tenant: str, url_key: str) -> ChunkKey:
    """Return the key for a tenant; raise `IdentityError` if it is malformed."""
    return ChunkKey.of(tenant, CacheEngineKey.from_url(url_key))


async def _accepts(accept: AcceptHeader = "") -> Accepts:
    words = {word.strip().lower() for word in accept.split(",")}
    return Accepts(lossy=LOSSLESS not in words)


AcceptedRecords = Annotated[Accepts, Depends(_accepts)]


async def _visible_store(storage: RunningStorage, accepts: AcceptedRecords) -> ServedStore:
    return storage.store.for_client(accepts)


VisibleStore = Annotated[ServedStore, Depends(_visible_store)]

router = APIRouter(prefix="/v1", tags=["chunks"], route_class=GuardedRoute)


@router.put(
    "/chunks/{key}",
    status_code=201,
    response_class=Response,
    openapi_extra={"requestBody": {"required": True, **RECORD_CONTENT}},
    responses={
        201: {"description": "Stored"},
        204: {"description": "Already stored"},
        **failures(400, 408, 413, 503, 507),
    },
)
async def put_chunk(
    key: PathKey,
    request: Request,
    principal: ClientPrincipal,
    storage: RunningStorage,
    accepts: AcceptedRecords,
) -> Response:
    """Store one verified record under its key.

    The body is a record (docs/protocols.md) whose key and digest must match. 201: stored in memory;
    slower tiers follow in the background. 204: it was there already. 422: no intact record of this
    key; 413: larger than `max_record_mb`; 507: no room; 503: the server drains, try another.
    """
    name = chunk_key(principal.tenant, key)
    if not storage.takes_chunks():
        raise DrainingError("this instance is draining")
    store = storage.store.for_client(accepts)
    chunk = await receive_record(request, name, store, storage.limits)
    try:
        [was_here] = await storage.near_for_client(accepts).contains([name])
        if not await store.put(chunk):
            raise CapacityError(f"no room for a record of {chunk.num_bytes} bytes")
    finally:
        chunk.release()
    return Response(status_code=204 if was_here else 201)


@router.get(
    "/chunks/{key}",
    response_class=Response,
    responses={200: {"description": "The record", **RECORD_CONTENT}, **failures(400, 404)},
)
async def get_chunk(
    key: PathKey, principal: ClientPrincipal, storage: RunningStorage, store: VisibleStore
) -> Response:
    """Read one record.

    From memory, disk or bucket, whichever has it. 404: no tier has it, or none in time, or only
    with an encoding that the caller does not accept; `detail` names the reason.
    """
    [result] = await store.get([chunk_key(principal.tenant, key)])
    if isinstance(result, Miss):
        raise NotFoundError(f"the chunk is not served: {result.reason}")
    return RecordResponse(result, storage.limits)


@router.head(
    "/chunks/{key}",
    response_class=Response,
    responses={200: {"description": "It exists"}, **failures(400, 404)},
)
async def head_chunk(key: PathKey, principal: ClientPrincipal, store: VisibleStore) -> Response:
    """Check whether one chunk exists.

    Does not count as a read, which would defer its eviction. 404: it does not exist here.
    """
    if await store.contains([chunk_key(principal.tenant, key)]) != [True]:
        raise NotFoundError("the chunk does not exist here")
    response = Response(media_type=RECORD_TYPE)
    del response.headers["content-length"]
    return response


@router.delete(
    "/chunks/{key}", status_code=204, response_class=Response, responses=failures(400, 404)
)
async def delete_chunk(key: PathKey, principal: ClientPrincipal, store: VisibleStore) -> Response:
    """Remove one chunk.

    From every tier of this server, its bucket included; others keep their copies. 404: it was not
    here.
    """
    if not await store.remove([chunk_key(principal.tenant, key)]):
        raise NotFoundError("the chunk does not exist here")
    return Response(status_code=204)


@router.post("/chunks:contains", responses=failures(400))
async def contains_chunks(keys: Keys, principal: ClientPrincipal, store: VisibleStore) -> Present:
    """Check which chunks exist.

    Does not read them. A tier that does not answer in time counts as empty. 400: a key cannot be
    read.
    """
    names = [chunk_key(principal.tenant, key) for key in keys.keys]
    return Present(present=await store.contains(names))


@router.post(
    "/chunks:get",
    response_class=Response,
    responses={200: {"description": "Records back to back", **RECORD_CONTENT}, **failures(400)},
)
async def get_chunks(
    keys: Keys, principal: ClientPrincipal, storage: RunningStorage, store: VisibleStore
) -> Response:
    """Read many records; missing ones are omitted.

    Those that exist follow one another in the order of the keys; the key in a record's head says
    which it is. For a caller that reads too slowly the answer breaks off, and the connection
    closes.
    400: a key cannot be read.
    """
    # Deduplicated: a short request must not ask for one record thousands of times.
    names = [chunk_key(principal.tenant, key) for key in dict.fromkeys(keys.keys)]
    return RecordsResponse(store, names, storage.limits)


@router.get("/chunks")
async def list_chunks(
    principal: ClientPrincipal,
    storage: RunningStorage,
    offset: Annotated[int, Query(ge=0, description="Chunks to skip.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Largest number of chunks.")] = 100,
) -> ListedChunks:
    """List the caller's chunks by key.

    Those in memory and on disk of this server, not those that only its bucket has. Pages are not of
    one moment: chunks stored or removed meanwhile may be skipped or appear twice.
    """
    end = offset + limit
    held = await storage.holdings(principal.tenant)
    page = [
        ListedChunk(key=key.key.to_url(), size_bytes=size, tiers=tiers)
        for key, size, tiers in held[offset:end]
    ]
    return ListedChunks(chunks=page, next_offset=end if end < len(held) else None)


async def receive_record(
    request: Request, key: ChunkKey, store: ServedStore, limits: ServerLimits
) -> Chunk:
    """Read a request's body into the arena and verify it there. The caller owns the chunk.

    Args:
        key: The key that the record must have.
        store: Provides the memory.

    Raises:
        RecordError: The body is not one intact record of that key, or states shapes that cannot be
            decoded from it.
        RecordTooLargeError: It declares more than `max_blob_bytes`.
        CapacityError: There is no room for it.
        SlowClientError: The body did not arrive in time, or its client disconnected.
    """
    num_received = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_received
        try:
            async for piece in request.stream():
                num_received += len(piece)
                yield piece
        except ClientDisconnect as exc:
            raise SlowClientError("the client disconnected in the middle of its body") from exc

    records = RecordStream(pieces())
    try:
        async with asyncio.timeout(limits.transfer_s(0)):
            head = await records.next_head()
        if head is None:
            raise RecordError(
                RecordReason.SHORT, "the body does not begin with the intact head of a record"
            )
        if head.header.key != key.key.canonical():
            raise RecordError(RecordReason.WRONG_KEY, "the record's key differs from the path")
        # Before memory is allocated for what the head declares.
        num_bytes = len(head.head) + head.payload_bytes
        declared = request.headers.get("content-length")
        if declared is not None and num_bytes != int(declared[:19]):
            raise RecordError(
                RecordReason.BOUNDS,
                f"the head declares a record of {num_bytes} bytes, the body has {declared[:19]}",
            )
        if num_bytes > limits.max_blob_bytes:
            raise RecordTooLargeError(
                f"the head declares a record of {num_bytes} bytes; the limit is"
                f" {limits.max_blob_bytes} (max_record_mb)"
            )
        async with paced(limits.transfer_s, lambda: num_received):
            result = await records.chunk(key, partial(store.allocate, tenant=key.tenant))
        if isinstance(result, Miss):
            if result.reason is MissReason.NO_MEMORY:
                raise CapacityError(f"no room for a payload of {head.payload_bytes} bytes")
            raise RecordError(
                RecordReason.DIGEST, "the payload does not match the digest in its head"
            )
        try:
            async with asyncio.timeout(limits.transfer_s(0)):
                more = await records.next_head()
            if more is not None or records.is_damaged:
                raise RecordError(RecordReason.BOUNDS, "there are bytes after the record")
            check_stated_size(result.described, result.memory.byte_array)
        except BaseException:
            result.release()
            raise
    except TimeoutError as exc:
        raise SlowClientError("the rest of the body did not arrive in time") from exc
    except SerdeError as exc:
        raise RecordError(RecordReason.BOUNDS, str(exc)) from exc
    return result


class RecordResponse(Response):
    """One record.

    Args:
        chunk: Passes to this response, which releases it.
    """

    media_type = RECORD_TYPE

    def __init__(self, chunk: Chunk, limits: ServerLimits) -> None:
        super().__init__(media_type=RECORD_TYPE, headers={"Content-Length": str(chunk.num_bytes)})
        self._chunk = chunk
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the record."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if await _send_record(self._chunk, self._limits, send):
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._chunk.release()


class RecordsResponse(Response):
    """The records of those chunks that exist, back to back, in the order of the keys."""

    media_type = RECORD_TYPE

    def __init__(self, store: ServedStore, keys: Sequence[ChunkKey], limits: ServerLimits) -> None:
        super().__init__(media_type=RECORD_TYPE)
        del self.headers["content-length"]
        self._store = store
        self._keys = keys
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and send the records, a few at a time. If all of them fit into one step, the length
        is stated: callers then read bytes, not HTTP chunks.
        """
        size = self._limits.get_batch
        for begin in range(0, max(1, len(self._keys)), size):
            chunks = [
                result
                for result in await self._store.get(self._keys[begin : begin + size])
                if isinstance(result, Chunk)
            ]
            try:
                if not begin:
                    if len(self._keys) <= size:
                        self.headers["Content-Length"] = str(
                            sum(chunk.num_bytes for chunk in chunks)
                        )
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                    )
                for chunk in chunks:
                    if not await _send_record(chunk, self._limits, send):
                        return
            finally:
                for chunk in chunks:
                    chunk.release()
        await send({"type": "http.response.body", "body": b""})


async def _send_record(chunk: Chunk, limits: ServerLimits, send: Send) -> bool:
    """Send a record's bytes, copied slice by slice: the transport may keep them longer than the
    chunk is referenced.

    Returns:
        False if the client was too slow: the response is left incomplete, so that the server closes
            the connection.
    """
    try:
        async with asyncio.timeout(limits.transfer_s(chunk.num_bytes)):
            await send({"type": "http.response.body", "body": chunk.head, "more_body": True})
            payload = chunk.memory.byte_array
            for at in range(0, len(payload), SLICE_BYTES):
                await send(
                    {
                        "type": "http.response.body",
                        "body": bytes(payload[at : at + SLICE_BYTES]),
                        "more_body": True,
                    }
                )
    except TimeoutError:
        logger.warning("client too slow for a record, disconnected: num_bytes=%d", chunk.num_bytes)
        return False
    return True
