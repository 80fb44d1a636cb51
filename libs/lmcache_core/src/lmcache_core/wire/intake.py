"""Records on their way from a client into the store, and what the audit is told of them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from lmcache_core.errors import ProtocolError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.wire.frames import FrameHeader
from lmcache_core.wire.incoming import IncomingRecord, Received
from lmcache_core.wire.messages import HandoverChunk, Message, PutOk
from lmcache_core.wire.served import (
    HandoverNote,
    HasTenant,
    NoteHandovers,
    ServedStore,
    TakesHandovers,
)
from lmcache_core.wire.stream import FrameStream

TIER: Final = "lm"
NOTE_INTERVAL_S: Final = 60.0
MAX_NOTED_TENANTS: Final = 16


class Intake:
    """Takes the records of PUT and HANDOVER off one connection, and keeps them until the store has
    them.

    Args:
        stream: The connection.
    """

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._arrived: dict[int, Received | Miss] = {}

    async def receive(
        self,
        header: FrameHeader,
        store: ServedStore,
        message: Message,
        tenant: str,
        handovers: TakesHandovers | None,
    ) -> None:
        """Take a record off the stream. It then has an owner, whatever becomes of its request: this
        object.

        Args:
            header: Of its frame.
            store: Where its memory comes from.
            message: Its frame's.
            tenant: Of the connection; a HANDOVER names its own.
            handovers: Takes handovers; None where this client may not hand anything over.

        Raises:
            ProtocolError: A HANDOVER that is not taken from this client.
        """
        if isinstance(message, HandoverChunk):
            if handovers is None:
                raise ProtocolError(
                    "HANDOVER, which this server has not said to take from this client"
                )
            if not message.may_evict and not handovers.has_room(header.blob_bytes):
                await self.refuse(header, MissReason.NO_MEMORY)
                return
            tenant = message.tenant
        allocate = partial(store.allocate, tenant=tenant)
        self._arrived[header.correlation_id] = await IncomingRecord(
            self._stream, header.blob_bytes, allocate
        ).receive(None)

    async def refuse(self, header: FrameHeader, reason: MissReason) -> None:
        """Take a record off the stream that will not be kept."""
        await self._stream.discard(header.blob_bytes)
        self._arrived[header.correlation_id] = Miss(reason)

    async def put(self, correlation_id: int, store: ServedStore, tenant: str) -> PutOk:
        """Verify and keep the record of a PUT."""
        return await self._kept(correlation_id, tenant, None, store.put)

    async def take_over(
        self, correlation_id: int, handovers: TakesHandovers, message: HandoverChunk
    ) -> PutOk:
        """Verify and keep the record of a HANDOVER."""
        return await self._kept(
            correlation_id, message.tenant, time.time() - message.age_ms / 1000, handovers.take_over
        )

    def num_bytes(self, correlation_id: int) -> int:
        """Size of the payload that has come with that request; 0 where it was not taken."""
        record = self._arrived[correlation_id]
        return record.memory.get_size() if isinstance(record, Received) else 0

    def close(self) -> None:
        """Give back the memory of records that were not stored. Idempotent."""
        while self._arrived:
            _, record = self._arrived.popitem()
            if isinstance(record, Received):
                record.memory.ref_count_down()

    async def _kept(
        self,
        correlation_id: int,
        tenant: str,
        stored_at: float | None,
        keep: Callable[[Chunk], Awaitable[bool]],
    ) -> PutOk:
        record = self._arrived[correlation_id]
        if isinstance(record, Miss):
            del self._arrived[correlation_id]
            return PutOk(False, record.reason.value)
        try:
            if not await record.verify():
                return PutOk(False, MissReason.CORRUPT.value)
            chunk = Chunk(
                ChunkKey(tenant, record.header.engine_key()),
                record.header,
                record.head,
                record.memory,
                TIER,
            )
            chunk.stored_at = stored_at
            is_kept = await keep(chunk)
            return PutOk(is_kept, "" if is_kept else MissReason.NO_MEMORY.value)
        finally:
            del self._arrived[correlation_id]
            record.memory.ref_count_down()


@dataclass(slots=True)
class HandoverLog:
    """Counts what one connection hands over: a server that ends hands over thousands of chunks. The
    first chunk is told of at once, what follows once a minute, the rest at the end.

    Attributes:
        note: Who is told; None: nobody.
        client: Address and port of the other side.
        clock: Seconds that never go back.
    """

    note: NoteHandovers | None
    client: str
    clock: Callable[[], float] = time.monotonic
    _caller: HasTenant | None = None
    _tenants: set[str] = field(default_factory=set)
    _num_chunks: int = 0
    _num_bytes: int = 0
    _num_refused: int = 0
    _told_at: float = float("-inf")

    def add(self, caller: HasTenant | None, tenant: str, num_bytes: int, is_kept: bool) -> None:
        """Count a chunk.

        Args:
            caller: Whose connection it came by, as it is known now; None: nobody's.
            tenant: In whose namespace it was to be put.
            num_bytes: Of its payload.
            is_kept: Whether it was.
        """
        self._caller = caller
        if len(self._tenants) < MAX_NOTED_TENANTS:
            self._tenants.add(tenant)
        self._num_chunks += is_kept
        self._num_bytes += num_bytes * is_kept
        self._num_refused += not is_kept
        if self.clock() - self._told_at >= NOTE_INTERVAL_S:
            self.tell()

    def tell(self) -> None:
        """Tell of what has not been told of."""
        if self.note is not None and self._num_chunks + self._num_refused:
            tenants = tuple(sorted(self._tenants))
            self.note(
                HandoverNote(
                    self._caller,
                    self.client,
                    tenants,
                    self._num_chunks,
                    self._num_bytes,
                    self._num_refused,
                )
            )
        self._told_at = self.clock()
        self._tenants.clear()
        self._num_chunks = self._num_bytes = self._num_refused = 0
