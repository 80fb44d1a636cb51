"""Read records from the body of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from lmcache_core.errors import RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import (
    PREFIX_BYTES,
    Allocate,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    decode_head,
    decode_prefix,
)
from lmcache_core.wire.incoming import Received

SKIPPED_AT_ONCE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The head of a record whose payload comes next."""

    header: RecordHeader
    head: bytes
    payload_bytes: int


class RecordStream:
    """Reads a sequence of records from a stream.

    Args:
        pieces: Bytes of the stream, in pieces of any size. One piece is held at a time, and none is
            used after the next one is requested.

    Attributes:
        is_damaged: The stream ended within a record, or a head is invalid, so that the start of the
            next record is unknown.
    """

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._current: RecordHead | None = None
        self.is_damaged = False

    async def next_head(self) -> RecordHead | None:
        """Return the head of the next record; None at the end or if `is_damaged`."""
        assert self._current is None, "the previous payload has not been taken"
        if self.is_damaged:
            return None
        data = bytearray(PREFIX_BYTES)
        num_bytes = await self._fill(memoryview(data))
        if not num_bytes:
            return None
        try:
            if num_bytes < PREFIX_BYTES:
                raise EOFError
            prefix = decode_prefix(data)
            data += bytes(prefix.head_bytes - PREFIX_BYTES)
            await self._fill_whole(memoryview(data)[PREFIX_BYTES:])
            header, payload_bytes = decode_head(data)
        except (RecordError, EOFError):
            self.is_damaged = True
            return None
        self._current = RecordHead(header, bytes(data), payload_bytes)
        return self._current

    async def chunk(self, key: ChunkKey, allocate: Allocate) -> Result:
        """Return the record of the last head as the chunk of that key, verified. The caller owns
        it.
        """
        record, self._current = self._current, None
        assert record is not None, "no head has been read"
        memory = allocate(record.payload_bytes)
        if memory is None:
            await self._skip(record.payload_bytes)
            return Miss(MissReason.NO_MEMORY)
        try:
            await self._fill_whole(memory.byte_array)
        except BaseException as exc:
            memory.ref_count_down()
            if not isinstance(exc, EOFError):
                raise
            self.is_damaged = True
            return Miss(MissReason.CORRUPT)
        return await Received(record.header, record.head, memory).verified(key, STORAGE_TIER)

    async def _skip(self, num_bytes: int) -> None:
        dropped = memoryview(bytearray(min(num_bytes, SKIPPED_AT_ONCE_BYTES)))
        while num_bytes and not self.is_damaged:
            part = dropped[:num_bytes]
            self.is_damaged = await self._fill(part) < len(part)
            num_bytes -= len(part)

    async def _fill_whole(self, view: memoryview) -> None:
        if await self._fill(view) < len(view):
            raise EOFError

    async def _fill(self, view: memoryview) -> int:
        """Fill `view` from the stream and return the number of bytes, fewer only at the end."""
        at = 0
        while at < len(view):
            while not len(self._piece):
                piece = await anext(self._pieces, None)
                if piece is None:
                    return at
                self._piece = memoryview(piece)
            taken = min(len(view) - at, len(self._piece))
            view[at : at + taken] = self._piece[:taken]
            self._piece = self._piece[taken:]
            at += taken
        return at
