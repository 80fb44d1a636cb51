"""Clears entries of ended leases from Redis in small steps."""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

from lmcache_core.keys import CHUNK_ID_BYTES
from lmcache_servicekit.redis_client import Argument, RedisClient, RedisCommand
from redis.exceptions import ResponseError

from lmcache_lookup.index import redis_scripts as scripts
from lmcache_lookup.index.packing import (
    NUM_BUCKETS,
    TENANTS_KEY,
    LiveTable,
    bucket_key,
    unpack_holders,
)

logger = logging.getLogger(__name__)

SWEEP_PAGE_CHUNKS: Final = 1024
MAX_BUCKETS_PER_STEP: Final = 16
TRIM_PAGE_CHUNKS: Final = 64
MAX_PAGES_PER_TRIM: Final = 64

_BEGIN: Final = b"0"
_IDENTITY: Final = struct.Struct("<IQ")
"""The first 12 bytes of a holder."""


class BucketSweeper:
    """Cycles through the buckets of all tenants."""

    def __init__(self, client: RedisClient, read_table: Callable[[], Awaitable[LiveTable]]) -> None:
        self._client = client
        self._read_table = read_table
        self._buckets: Iterator[str] = iter(())
        self._bucket: str | None = None
        self._cursor = _BEGIN

    async def step(self) -> int:
        """Check about a thousand chunks, or a few empty buckets; return how many entries were
        cleared.
        """
        num_swept = num_seen = 0
        for _ in range(MAX_BUCKETS_PER_STEP):
            if self._bucket is None:
                await self._begin_bucket()
            if self._bucket is None or num_seen >= SWEEP_PAGE_CHUNKS:
                break
            page = await self._page(self._bucket)
            num_seen += len(page)
            num_swept += await self._prune(self._bucket, page)
            if self._cursor == _BEGIN:
                self._bucket = None
        return num_swept

    async def trim(self, bucket: str, max_holders: int, newest: Sequence[bytes]) -> int:
        """Make room in a bucket that has more than `max_holders`: dead ones go first, then chunks
        in the order of a hand that goes around the bucket.

        Args:
            bucket: Its key.
            newest: Chunks that were just stored, in order: they go last, and the last one stays.

        Returns:
            How many chunks with a live holder were dropped.
        """
        num_dropped = 0
        rank = {chunk_id: place for place, chunk_id in enumerate(newest)}
        look = RedisCommand(bucket, ("HGET", bucket, "#at"))
        at = (await self._client.many([look]))[0] or _BEGIN
        for _ in range(MAX_PAGES_PER_TRIM):
            scan = RedisCommand(bucket, ("HSCAN", bucket, at, "COUNT", TRIM_PAGE_CHUNKS))
            answer: Any = (await self._client.many([scan]))[0]
            if answer is None:
                break
            at, flat = answer
            page = dict(zip(flat[::2], flat[1::2], strict=True))
            await self._prune(bucket, page)
            chunk_ids = [each for each in page if len(each) == CHUNK_ID_BYTES]
            chunk_ids.sort(key=lambda each: rank.get(each, -1))
            if newest and chunk_ids[-1:] == [newest[-1]]:
                del chunk_ids[-1]
            is_full, num_gone = await self._client.run(
                scripts.TRIM, [bucket], [max_holders, at, *chunk_ids]
            )
            num_dropped += num_gone
            if not is_full:
                break
        return num_dropped

    async def _begin_bucket(self) -> None:
        self._cursor = _BEGIN
        self._bucket = next(self._buckets, None)
        if self._bucket is None:
            asking = RedisCommand(TENANTS_KEY, ("SMEMBERS", TENANTS_KEY))
            tenants = (await self._client.many([asking]))[0]
            names = sorted(tenant.decode() for tenant in tenants or ())
            self._buckets = (
                bucket_key(name, bucket) for bucket in range(NUM_BUCKETS) for name in names
            )
            self._bucket = next(self._buckets, None)

    async def _page(self, bucket: str) -> dict[bytes, bytes]:
        look = RedisCommand(bucket, ("HSCAN", bucket, self._cursor, "COUNT", SWEEP_PAGE_CHUNKS))
        answer: Any
        answer, ttl_ms = await self._client.many([look, RedisCommand(bucket, ("PTTL", bucket))])
        if ttl_ms > 0:
            await self._keep(bucket)
        if answer is None:
            logger.warning("deleting a foreign value under a bucket's key: key=%s", bucket)
            await self._client.many([RedisCommand(bucket, ("UNLINK", bucket))])
            self._cursor = _BEGIN
            return {}
        self._cursor, flat = answer
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def _keep(self, bucket: str) -> None:
        """Remove the expiry of a bucket of 0.1.0, which counts from the last change.

        The chunks in the bucket may be held for longer.
        """
        try:
            await self._client.many([RedisCommand(bucket, ("PERSIST", bucket))])
        except ResponseError as exc:
            # The next cycle tries again.
            logger.debug(
                "cannot remove a bucket's expiry: key=%s error=%s", bucket, type(exc).__name__
            )

    async def _prune(self, bucket: str, page: dict[bytes, bytes]) -> int:
        if not page:
            return 0
        # The leases are read after the entries: an instance had its lease before it wrote them.
        alive = (await self._read_table()).by_identity
        dead: list[Argument] = []
        for chunk_id, value in page.items():
            for packed in unpack_holders(value):
                if (packed.number, packed.incarnation) not in alive:
                    dead += [chunk_id, _IDENTITY.pack(packed.number, packed.incarnation)]
        return int(await self._client.run(scripts.PRUNE, [bucket], dead)) if dead else 0
