"""Receives one record: from the socket into memory, checked at every step."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.errors import RecordError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import (
    PREFIX_BYTES,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    RecordReason,
    Result,
    decode_head,
    decode_prefix,
    has_its_digest,
)
from lmcache_core.wire.stream import FrameStream


@dataclass(frozen=True, slots=True)
class Received:
    """A whole record whose payload has not been verified yet. The holder owns a reference on
    `memory`.
    """

    header: RecordHeader
    head: bytes
    memory: MemoryObj

    async def is_whole(self) -> bool:
        """Return whether the payload matches the digest in its header (see `has_its_digest`)."""
        return await has_its_digest(self.header, self.memory.byte_array)

    async def verified(self, key: ChunkKey, tier: str) -> Result:
        """Return the chunk, or a miss if the payload is damaged. The reference on `memory` passes
        to the chunk, or is released.
        """
        is_whole = False
        try:
            is_whole = await self.is_whole()
        finally:
            if not is_whole:
                self.memory.ref_count_down()
        if not is_whole:
            return Miss(MissReason.CORRUPT)
        return Chunk(key, self.header, self.head, self.memory, tier)


def miss_for(error: RecordError) -> Miss:
    """Return the miss that corresponds to a refused record."""
    return Miss(
        MissReason.IDENTITY if error.reason == RecordReason.WRONG_KEY else MissReason.CORRUPT
    )


class OversizedBlobError(Exception):
    """A blob is no record of its size, and too long to be read to its end."""


class IncomingRecord:
    """Receives the record in the blob of one frame. The blob is consumed to its end, even if the
    record is damaged.

    Args:
        stream: Positioned at the first byte of the blob.
        max_skipped_bytes: How much of a blob is read for nothing; None: all of it.
    """

    def __init__(
        self,
        stream: FrameStream,
        blob_bytes: int,
        allocate: Allocate,
        max_skipped_bytes: int | None = None,
    ) -> None:
        self._stream = stream
        self._num_left = blob_bytes
        self._allocate = allocate
        self._max_skipped_bytes = max_skipped_bytes
        self._memory: MemoryObj | None = None
        self._dropped = False

    async def receive(self, expected: CacheEngineKey | None) -> Received | Miss:
        """Read the record.

        Args:
            expected: The key requested; None accepts any.

        Returns:
            The record, or the reason why there is none. The caller owns the memory.

        Raises:
            UnavailableError: The connection ended.
            OversizedBlobError: It is no record, and more than `max_skipped_bytes` are left.
        """
        try:
            if self._num_left < PREFIX_BYTES:
                raise RecordError(RecordReason.SHORT, f"a blob of {self._num_left} bytes")
            head = await self._read(PREFIX_BYTES)
            prefix = decode_prefix(head)
            if prefix.head_bytes + prefix.payload_bytes != PREFIX_BYTES + self._num_left:
                raise RecordError(RecordReason.BOUNDS, "the record does not fill its blob")
            head += await self._read(prefix.head_bytes - PREFIX_BYTES)
            header, payload_bytes = decode_head(head, expected)
        except RecordError as exc:
            if self._max_skipped_bytes is not None and self._num_left > self._max_skipped_bytes:
                raise OversizedBlobError from exc
            await self._stream.discard(self._num_left)
            return miss_for(exc)
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
        """Release the memory now; the rest of the blob is read and discarded."""
        self._dropped = True
        self._stream.forget_target()
        if self._memory is not None:
            self._memory.ref_count_down()
            self._memory = None

    async def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        await self._stream.readinto(memoryview(data))
        self._num_left -= num_bytes
        return bytes(data)
