"""One record on its way in: from the socket into memory, checked at every step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from lmcache_core.errors import RecordError
from lmcache_core.keys import CacheEngineKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import (
    PREFIX_BYTES,
    Allocate,
    Miss,
    MissReason,
    RecordHeader,
    RecordPrefix,
    RecordReason,
    decode_head,
    decode_prefix,
    verify_payload,
)
from lmcache_core.wire.stream import FrameStream

INLINE_VERIFY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Received:
    """A whole record whose payload has not been verified yet. Whoever holds it owns a reference
    on `memory`.
    """

    header: RecordHeader
    head: bytes
    memory: MemoryObj

    async def verify(self) -> bool:
        """Whether the payload has the digest that the header names. Large ones are read in a
        thread.

        Cancelled, the thread may still read memory that was given back meanwhile: it writes
        nothing, and nobody asks for its result.
        """
        payload = self.memory.byte_array
        try:
            if len(payload) <= INLINE_VERIFY_BYTES:
                verify_payload(self.header, payload)
            else:
                await asyncio.to_thread(verify_payload, self.header, payload)
        except RecordError:
            return False
        return True


class IncomingRecord:
    """Receives the record in the blob of one frame. Whatever is wrong with the record, the blob is
    consumed to its end.

    Args:
        stream: Stands at the first byte of the blob.
        blob_bytes: Length of the blob.
        allocate: Where the payload goes.
    """

    def __init__(self, stream: FrameStream, blob_bytes: int, allocate: Allocate) -> None:
        self._stream = stream
        self._num_left = blob_bytes
        self._allocate = allocate
        self._memory: MemoryObj | None = None
        self._dropped = False

    async def receive(self, expected: CacheEngineKey | None) -> Received | Miss:
        """Read the record.

        Args:
            expected: The key that was asked for; None takes any.

        Returns:
            The record, or why there is none. The caller owns the memory.

        Raises:
            UnavailableError: The connection ended.
        """
        try:
            head, header, payload_bytes = await self._receive_head(expected)
        except RecordError as exc:
            await self._stream.discard(self._num_left)
            return Miss(
                MissReason.IDENTITY if exc.reason == RecordReason.WRONG_KEY else MissReason.CORRUPT
            )
        memory = None if self._dropped else self._allocate(payload_bytes)
        if memory is None:
            await self._stream.discard(self._num_left)
            return Miss(MissReason.NO_MEMORY)
        self._memory = memory
        try:
            await self._stream.readinto(memory.byte_array)
        except BaseException:
            self.drop()
            raise
        if self._dropped:
            return Miss(MissReason.NO_MEMORY)
        self._memory = None
        return Received(header, head, memory)

    def drop(self) -> None:
        """Give the memory back now; what is still to come is read and thrown away."""
        self._dropped = True
        self._stream.forget_target()
        if self._memory is not None:
            self._memory.ref_count_down()
            self._memory = None

    async def _receive_head(
        self, expected: CacheEngineKey | None
    ) -> tuple[bytes, RecordHeader, int]:
        if self._num_left < PREFIX_BYTES:
            raise RecordError(RecordReason.SHORT, f"a blob of {self._num_left} bytes")
        prefix_bytes = await self._read(PREFIX_BYTES)
        prefix = decode_prefix(prefix_bytes)
        if prefix.head_bytes + prefix.payload_bytes != PREFIX_BYTES + self._num_left:
            raise RecordError(RecordReason.BOUNDS, "the record does not fill its blob")
        head = prefix_bytes + await self._read(_rest_of_head(prefix))
        header, payload_bytes = decode_head(head, expected)
        return head, header, payload_bytes

    async def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        await self._stream.readinto(memoryview(data))
        self._num_left -= num_bytes
        return bytes(data)


def _rest_of_head(prefix: RecordPrefix) -> int:
    return prefix.head_bytes - PREFIX_BYTES
