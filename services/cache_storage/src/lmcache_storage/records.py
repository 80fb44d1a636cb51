"""Answers that send chunks out of the arena, and let go of them whatever becomes of the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from fastapi import Response
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.wire.served import ServedStore, ServerLimits
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

RECORD_TYPE = "application/vnd.lmcache.record"
SLICE_BYTES = 128 << 10
"""What is copied at once. Larger copies cost several times as much: the system takes their
memory back and clears it page by page.
"""


class RecordResponse(Response):
    """One record.

    Args:
        chunk: Passes to this response, which releases it.
        limits: How slow the client may be.
    """

    media_type = RECORD_TYPE

    def __init__(self, chunk: Chunk, limits: ServerLimits) -> None:
        super().__init__(media_type=RECORD_TYPE, headers={"Content-Length": str(chunk.num_bytes)})
        self._chunk = chunk
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if await _send_record(self._chunk, self._limits, send):
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._chunk.release()


class RecordsResponse(Response):
    """The records of those chunks that are here, back to back, in the order of the keys.

    Args:
        store: Where they are.
        keys: Their names.
        limits: How many are referenced at once, and how slow the client may be.
    """

    media_type = RECORD_TYPE

    def __init__(self, store: ServedStore, keys: Sequence[ChunkKey], limits: ServerLimits) -> None:
        super().__init__(media_type=RECORD_TYPE)
        del self.headers["content-length"]
        self._store = store
        self._keys = keys
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and send them, a few at a time. Where that is all of them, the length is told:
        callers then read bytes, not HTTP chunks.
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
    """Send a record's bytes, copied slice by slice: the transport may keep what it is given longer
    than the chunk is referenced.

    Returns:
        False when the client was too slow: the answer is left unfinished, at which the server
        closes the connection.
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
        logger.warning("client too slow for a record, cut off: num_bytes=%d", chunk.num_bytes)
        return False
    return True
