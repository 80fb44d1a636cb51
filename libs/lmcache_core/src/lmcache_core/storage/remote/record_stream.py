"""Records that come back to back in one HTTP body, each payload read straight into memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from lmcache_core.errors import RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import (
    PREFIX_BYTES,
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    Result,
    decode_head,
    decode_prefix,
)
from lmcache_core.storage.remote.base import REMOTE_TIER, payload_is_whole

SKIPPED_AT_ONCE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The head of a record whose payload comes next."""

    header: RecordHeader
    head: bytes
    payload_bytes: int


class RecordStream:
    """A pulled sequence of records.

    Args:
        pieces: The bytes that they are in, in pieces of any size. One piece is held at a time, and
            none is looked at once the next one is asked for.

    Attributes:
        is_damaged: The stream ended within a record, or one's head cannot be read: where the next
            record begins is not known.
    """

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._current: RecordHead | None = None
        self.is_damaged = False

    async def next_head(self) -> RecordHead | None:
        """Return the head of the next record, None at the end or where `is_damaged`."""
        assert self._current is None, "the payload before it has been neither taken nor skipped"
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
        """Return the record whose head was read last as the chunk of that key, verified. The
        caller owns it.
        """
        record, self._current = self._current, None
        assert record is not None, "no head has been read"
        memory = allocate(record.payload_bytes)
        if memory is None:
            await self._skip(record.payload_bytes)
            return Miss(MissReason.NO_MEMORY)
        is_whole = False
        try:
            await self._fill_whole(memory.byte_array)
            is_whole = await payload_is_whole(record.header, memory.byte_array)
        except EOFError:
            self.is_damaged = True
        except BaseException:
            memory.ref_count_down()
            raise
        if not is_whole:
            memory.ref_count_down()
            return Miss(MissReason.CORRUPT)
        return Chunk(key, record.header, record.head, memory, REMOTE_TIER)

    async def skip_payload(self) -> None:
        """Read the payload whose head was read last, and drop it."""
        record, self._current = self._current, None
        assert record is not None, "no head has been read"
        await self._skip(record.payload_bytes)

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
        """Fill `view` with what comes next and return how much came: less only at the end."""
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
