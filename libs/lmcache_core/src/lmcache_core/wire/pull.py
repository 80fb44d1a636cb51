"""One GET: collects what arrives, verifies it, and says why the rest is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.wire.connection import Arrival, Call, ClientConnection
from lmcache_core.wire.frames import FrameType
from lmcache_core.wire.incoming import Received
from lmcache_core.wire.messages import Get, GetEnd


class Pull:
    """Fetches one batch of keys over one connection.

    Args:
        connection: Open.
        keys: At most `connection.max_batch`.
        allocate: Where payloads go.
        tier: Name that the chunks carry.
    """

    def __init__(
        self, connection: ClientConnection, keys: Sequence[ChunkKey], allocate: Allocate, tier: str
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._allocate = allocate
        self._tier = tier
        self._results: list[Result | None] = [None] * len(keys)
        self.is_complete = False

    async def run(self, prefix_only: bool, ticket: str | None, deadline: float) -> list[Result]:
        """Ask, and collect until the answer is complete, the deadline passes or the connection is
        lost.

        Args:
            prefix_only: Stop at the first that is missing.
            ticket: A broker's ticket.
            deadline: Time of the event loop.

        Returns:
            One result a key; the caller owns the chunks. `is_complete` tells whether the server
            gave its whole answer.

        Raises:
            AuthenticationError: The server refused.
        """
        call: Call | None = None
        rest = MissReason.UNAVAILABLE
        try:
            async with asyncio.timeout_at(deadline):
                message = Get([k.key.canonical() for k in self._keys], prefix_only, ticket)
                keys = [k.key for k in self._keys]
                call = await self._connection.start(
                    message, FrameType.GET_END, keys=keys, allocate=self._allocate
                )
                rest = await self._collect(call, prefix_only)
                self.is_complete = True
        except TimeoutError:
            rest = MissReason.DEADLINE
            if call is not None:
                self._connection.expire(call)
        except UnavailableError:
            if call is not None:
                self._connection.abandon(call)
        except BaseException:
            if call is not None:
                self._connection.abandon(call)
            self._release()
            raise
        return [Miss(rest) if result is None else result for result in self._results]

    async def _collect(self, call: Call, prefix_only: bool) -> MissReason:
        """Fill in results until GET_END; the reason that stands for the keys it does not name."""
        while True:
            item = await self._connection.next_item(call)
            if isinstance(item, Arrival):
                self._results[item.index] = await self._verified(item.index, item.record)
            elif isinstance(item, GetEnd):
                return self._finish(item, prefix_only)

    async def _verified(self, index: int, record: Received | Miss) -> Result:
        if isinstance(record, Miss):
            return record
        try:
            is_whole = await record.verify()
        except BaseException:
            record.memory.ref_count_down()
            raise
        if not is_whole:
            record.memory.ref_count_down()
            return Miss(MissReason.CORRUPT)
        return Chunk(self._keys[index], record.header, record.head, record.memory, self._tier)

    def _finish(self, end: GetEnd, prefix_only: bool) -> MissReason:
        reasons = [_reason(text) for _, text in end.misses]
        for (index, _), reason in zip(end.misses, reasons, strict=True):
            if index >= len(self._results) or self._results[index] is not None:
                raise self._broken(
                    f"it names key {index}, which is answered already or was not asked for"
                )
            self._results[index] = Miss(reason)
        if prefix_only and reasons:
            return reasons[0]
        if None in self._results:
            raise self._broken("it leaves a key unanswered")
        return MissReason.UNAVAILABLE

    def _broken(self, why: str) -> UnavailableError:
        self._connection.abort()
        return UnavailableError(f"GET_END breaks the protocol: {why}")

    def _release(self) -> None:
        for result in self._results:
            if isinstance(result, Chunk):
                result.release()


def _reason(text: str) -> MissReason:
    try:
        return MissReason(text)
    except ValueError:
        return MissReason.UNAVAILABLE
