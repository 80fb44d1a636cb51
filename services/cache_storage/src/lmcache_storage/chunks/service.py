"""What REST does with chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from lmcache_core.errors import CapacityError, RecordError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.record import Chunk, Miss, MissReason, RecordReason
from lmcache_core.storage.remote.http import RecordStream
from lmcache_core.wire import ServedStore, ServerLimits
from lmcache_core.wire.stream import paced
from lmcache_servicekit.errors import NotFoundError

from lmcache_storage.chunks.bodies import IncomingBody
from lmcache_storage.problems import DrainingError, RecordTooLargeError, SlowClientError


class ChunkService:
    """Chunks of authenticated tenants, from and to REST.

    Args:
        store: Where they are, as the client sees it.
        near: The same without the bucket.
        takes_chunks: Whether new chunks are taken: no drain has begun.
        limits: How slow a client may be.
    """

    def __init__(
        self,
        store: ServedStore,
        near: ServedStore,
        takes_chunks: Callable[[], bool],
        limits: ServerLimits,
    ) -> None:
        self.store = store
        self.near = near
        self._takes_chunks = takes_chunks
        self.limits = limits

    async def put(self, tenant: str, url_key: str, body: IncomingBody) -> bool:
        """Keep the record that a body brings; its payload goes straight into the arena and is
        verified there.

        Args:
            tenant: Who stores it.
            url_key: Its key, in URL spelling.
            body: The record.

        Returns:
            Whether the chunk is new in memory and on disk.

        Raises:
            IdentityError: That is no key.
            RecordError: The body is not one intact record of that key.
            RecordTooLargeError: It declares more than a record may have here.
            CapacityError: There is no room for it.
            DrainingError: This instance takes no new chunks.
            SlowClientError: The body did not arrive in time.
        """
        key = _chunk_key(tenant, url_key)
        if not self._takes_chunks():
            raise DrainingError("this instance is draining")
        chunk = await self._receive(key, body)
        try:
            [is_near] = await self.near.contains([key])
            was_there = is_near and (await self.store.contains([key])) == [
                True
            ]  # the first asks no bucket, the second knows the client
            if not await self.store.put(chunk):
                raise CapacityError(f"no room for a record of {chunk.num_bytes} bytes")
        finally:
            chunk.release()
        return not was_there

    async def get(self, tenant: str, url_key: str) -> Chunk:
        """One chunk; the caller owns it.

        Raises:
            IdentityError: That is no key.
            NotFoundError: It is not served; the text says why.
        """
        [result] = await self.store.get([_chunk_key(tenant, url_key)])
        if isinstance(result, Miss):
            raise NotFoundError(f"the chunk is not served: {result.reason}")
        return result

    async def contains(self, tenant: str, url_keys: Sequence[str]) -> list[bool]:
        """Which of them are here. Raises `IdentityError` for what is no key."""
        return await self.store.contains(chunk_keys(tenant, url_keys))

    async def check(self, tenant: str, url_key: str) -> None:
        """Return if the chunk is here. Raises `IdentityError` or `NotFoundError`."""
        [is_here] = await self.contains(tenant, [url_key])
        if not is_here:
            raise NotFoundError("the chunk is not here")

    async def remove(self, tenant: str, url_key: str) -> None:
        """Forget a chunk. Raises `IdentityError` or `NotFoundError`."""
        if not await self.store.remove([_chunk_key(tenant, url_key)]):
            raise NotFoundError("the chunk is not here")

    async def _receive(self, key: ChunkKey, body: IncomingBody) -> Chunk:
        records = RecordStream(body.pieces())
        try:
            async with asyncio.timeout(self.limits.transfer_s(0)):
                head = await records.next_head()
            if head is None:
                raise RecordError(
                    RecordReason.SHORT, "the body does not begin with the intact head of a record"
                )
            if head.header.key != key.key.canonical():
                raise RecordError(
                    RecordReason.WRONG_KEY, "the record has another key than the path"
                )
            _check_length(
                len(head.head) + head.payload_bytes, body.num_bytes, self.limits.max_blob_bytes
            )
            async with paced(self.limits.transfer_s, lambda: body.num_received):
                result = await records.chunk(key, partial(self.store.allocate, tenant=key.tenant))
            if isinstance(result, Miss):
                raise _refusal(result, head.payload_bytes)
            await self._expect_end(records, result)
        except TimeoutError as exc:
            raise SlowClientError("the rest of the body did not arrive in time") from exc
        return result

    async def _expect_end(self, records: RecordStream, chunk: Chunk) -> None:
        try:
            async with asyncio.timeout(self.limits.transfer_s(0)):
                more = await records.next_head()
            if more is not None or records.is_damaged:
                raise RecordError(RecordReason.BOUNDS, "there are bytes behind the record")
        except BaseException:
            chunk.release()
            raise


def chunk_keys(tenant: str, url_keys: Sequence[str]) -> list[ChunkKey]:
    """Keys of that tenant's namespace. Raises `IdentityError` for what is no key."""
    return [_chunk_key(tenant, url_key) for url_key in url_keys]


def _chunk_key(tenant: str, url_key: str) -> ChunkKey:
    return ChunkKey(tenant, CacheEngineKey.from_url(url_key))


def _check_length(num_bytes: int, declared: int | None, max_bytes: int) -> None:
    """Compare the size that a head declares with that of its body, before memory is taken for it.

    Raises:
        RecordError: They differ.
        RecordTooLargeError: It is more than a record may have here.
    """
    if declared is not None and num_bytes != declared:
        raise RecordError(
            RecordReason.BOUNDS,
            f"the head declares a record of {num_bytes} bytes, the body has {declared}",
        )
    if num_bytes > max_bytes:
        raise RecordTooLargeError(
            f"the head declares a record of {num_bytes} bytes; at most {max_bytes} are taken"
            " (max_record_mb)"
        )


def _refusal(miss: Miss, payload_bytes: int) -> RecordError | CapacityError:
    if miss.reason is MissReason.NO_MEMORY:
        return CapacityError(f"no room for a payload of {payload_bytes} bytes")
    return RecordError(RecordReason.DIGEST, "the payload is not the one that the head describes")
