"""Reads records that come back to back in pieces of any size, each payload straight into memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from lmcache_core.errors import RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import PREFIX_BYTES, Allocate, Chunk, Miss, MissReason, RecordHeader, Result, decode_head, decode_prefix
from lmcache_core.storage.remote.base import REMOTE_TIER, payload_is_whole


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The head of a record whose payload comes next."""

    header: RecordHeader
    head: bytes
    payload_bytes: int


class RecordStream:
    """A pulled sequence of records. Holds one piece at a time.

    Args:
        pieces: Bytes as they come.

    Attributes:
        is_damaged: The stream ended within a record, or a head in it is none: where the next record begins is not known.
    """

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._current: RecordHead | None = None
        self.is_damaged = False

    async def next_head(self) -> RecordHead | None:
        """The head of the next record; None at the end, be it a good one or not (see `is_damaged`)."""
        assert self._current is None, "the payload before it has been neither taken nor skipped"
        if self.is_damaged or not await self._refill():
            return None
        data = bytearray(PREFIX_BYTES)
        try:
            await self._fill(memoryview(data))
            prefix = decode_prefix(data)
            data += bytes(prefix.head_bytes - PREFIX_BYTES)
            await self._fill(memoryview(data)[PREFIX_BYTES:])
            header, payload_bytes = decode_head(data)
        except (RecordError, EOFError):
            self.is_damaged = True
            return None
        self._current = RecordHead(header, bytes(data), payload_bytes)
        return self._current

    async def chunk(self, key: ChunkKey, allocate: Allocate) -> Result:
        """The record whose head was read last, as the chunk of that key, verified. The caller owns it."""
        record, self._current = self._current, None
        assert record is not None, "no head has been read"
        memory = allocate(record.payload_bytes)
        if memory is None:
            await self._skip(record.payload_bytes)
            return Miss(MissReason.NO_MEMORY)
        is_whole = False
        try:
            await self._fill(memory.byte_array)
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
        while num_bytes:
            if not await self._refill():
                self.is_damaged = True
                return
            taken = min(num_bytes, len(self._piece))
            self._piece = self._piece[taken:]
            num_bytes -= taken

    async def _fill(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            if not await self._refill():
                raise EOFError
            taken = min(len(view) - at, len(self._piece))
            view[at : at + taken] = self._piece[:taken]
            self._piece = self._piece[taken:]
            at += taken

    async def _refill(self) -> bool:
        """Have at least one byte at hand; False at the end."""
        while not len(self._piece):
            piece = await anext(self._pieces, None)
            if piece is None:
                return False
            self._piece = memoryview(piece)
        return True
