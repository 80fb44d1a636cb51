"""Takes requests off connections; large ones share a bound on the memory that they take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from lmcache_core.errors import ProtocolError
from lmcache_core.sidecar import messages as m
from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.telemetry import Counters

from lmcache_sidecar import metrics

MAX_FREE_REQUEST_BYTES = 128 << 10
"""A request of this size is read at once, whatever others are about: about the names of a
thousand chunks.
"""
MAX_LARGE_REQUEST_BYTES = 64 << 20
"""Larger ones of all clients together, from their first byte until they are answered."""
LARGE_REQUEST_TIMEOUT_S = 10.0
"""So long a larger one may wait for its turn and then take to arrive; clients wait less for
their answers.
"""


class Requests:
    """What all connections of one socket are asking for just now.

    Args:
        counters: Where requests that did not come through are counted, under the names of
            `lmcache_sidecar.metrics`.
    """

    def __init__(self, counters: Counters) -> None:
        self._gate = ByteGate(MAX_LARGE_REQUEST_BYTES)
        self._counters = counters

    @property
    def large_bytes(self) -> int:
        """What the large ones take, those included that are still arriving."""
        return self._gate.used_bytes

    @asynccontextmanager
    async def next(self, reader: asyncio.StreamReader) -> AsyncIterator[m.Request]:
        """The next request of a connection; inside it is being answered.

        Raises:
            ProtocolError: It is none, or a large one that found no room or did not arrive in time;
                the connection is to be closed.
        """
        (length,) = m.LENGTH.unpack(await reader.readexactly(m.LENGTH.size))
        m.check_length(length)
        if length <= MAX_FREE_REQUEST_BYTES:
            yield m.decode_request(await reader.readexactly(length))
            return
        async with AsyncExitStack() as room:
            yield m.decode_request(await self._large(reader, length, room))

    async def _large(
        self, reader: asyncio.StreamReader, length: int, room: AsyncExitStack
    ) -> bytes:
        """Nothing of it is read before there is room: until then it waits with the client."""
        reason = metrics.NO_ROOM
        try:
            async with asyncio.timeout(LARGE_REQUEST_TIMEOUT_S):
                await room.enter_async_context(self._gate.using(length))
                reason = metrics.TOO_SLOW
                return await reader.readexactly(length)
        except TimeoutError as exc:
            self._counters.add(metrics.REFUSED_CLIENTS_TOTAL, 1, reason)
            cause = (
                "others took all the room that there is"
                if reason == metrics.NO_ROOM
                else "it had not arrived"
            )
            raise ProtocolError(
                f"message of {length} bytes: {cause} after {LARGE_REQUEST_TIMEOUT_S:g} s; send"
                " smaller ones"
            ) from exc
