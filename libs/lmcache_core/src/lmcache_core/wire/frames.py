"""The header of a frame: its 32 bytes, checksum and bounds.

Source: `docs/protocols.md`, "lm://" and "Sidecar socket". Golden vectors:
`tests/contract/golden/frames.json`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import xxhash

from lmcache_core.errors import ProtocolError
from lmcache_core.record import MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES

MAGIC = b"LMF1"
HEADER_BYTES = 32
MAX_META_BYTES = 1 << 20
MAX_ARENA_META_BYTES = 8 << 20
"""Meta of a frame about the arena: it names up to 65,536 chunks, or the heads of 4,096."""
MAX_BLOB_BYTES = MAX_PAYLOAD_BYTES + MAX_HEAD_BYTES
MAX_CORRELATION_ID = (1 << 64) - 1

_HEADER = struct.Struct("<4sB3sQIIQ")
_BEFORE_CHECKSUM = struct.Struct("<4sB3sQI")
_CHECKSUM = struct.Struct("<I")
_AFTER_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = _BEFORE_CHECKSUM.size
_CHECKSUM_END = _CHECKSUM_AT + _CHECKSUM.size
_LOW_32_BITS = 0xFFFFFFFF
_RESERVED = bytes(3)


class FrameType(IntEnum):
    """Types of frames. Numbers never change their meaning."""

    HELLO = 1
    HELLO_OK = 2
    CONTAINS = 3
    CONTAINS_OK = 4
    GET = 5
    CHUNK = 6
    GET_END = 7
    PUT = 8
    PUT_OK = 9
    REMOVE = 10
    REMOVE_OK = 11
    PING = 12
    PONG = 13
    ERROR = 14
    HANDOVER = 15
    CONTEXT = 16
    HELD = 17
    LANE = 18
    RESERVE = 19
    EXTENTS = 20
    COMMIT = 21
    LOAD = 22
    STAGE = 23
    PROMISE = 24
    DONE = 25
    OK = 26
    REJECT = 27
    DESCRIBE = 28
    LOOKUP = 29
    STATS = 30
    STATS_OK = 31
    PREFETCH = 32
    WATCH = 33
    CHANGES = 34
    EXPECT = 35
    LEND = 36
    LENT = 37
    GIVE_BACK = 38


_TYPES = MappingProxyType({int(kind): kind for kind in FrameType})
_OF_ARENA = frozenset(range(FrameType.RESERVE, FrameType.EXPECT + 1))
"""Frames about a sidecar's arena, used only on its Unix socket."""
WITH_RECORD = frozenset({FrameType.PUT, FrameType.HANDOVER})
_WITH_BLOB = WITH_RECORD | {FrameType.CHUNK}
_OF_NO_REQUEST = frozenset({FrameType.ERROR, FrameType.LANE})
"""Frames that may be about the connection itself."""


class FrameHeader(NamedTuple):
    """The header of one frame.

    Attributes:
        correlation_id: The request that it belongs to; 0 is the connection itself.
        meta_bytes: Length of the MessagePack part.
        blob_bytes: Length of the raw bytes after it.
    """

    type: FrameType
    correlation_id: int
    meta_bytes: int
    blob_bytes: int


def build_header(header: FrameHeader) -> bytes:
    """Return the 32 bytes of a header.

    Raises:
        ProtocolError: A field is out of bounds.
    """
    _check_bounds(header)
    kind, correlation_id, meta_bytes, blob_bytes = header
    before = _BEFORE_CHECKSUM.pack(MAGIC, kind, _RESERVED, correlation_id, meta_bytes)
    after = _AFTER_CHECKSUM.pack(blob_bytes)
    return before + _CHECKSUM.pack(_checksum(before + after)) + after


def parse_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Parse and check the header of a frame.

    Args:
        data: Exactly `HEADER_BYTES` bytes.

    Raises:
        ProtocolError: The bytes are not a frame header, are damaged, or violate a bound.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a frame header of {len(data)} bytes")
    data = bytes(data)
    magic, number, reserved, correlation_id, meta_bytes, checksum, blob_bytes = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("not a frame: wrong magic")
    if checksum != _checksum(data[:_CHECKSUM_AT] + data[_CHECKSUM_END:]):
        raise ProtocolError("a frame header with a wrong checksum")
    kind = _TYPES.get(number)
    if reserved != _RESERVED or kind is None:
        raise ProtocolError(f"a frame of unknown type {number}")
    header = FrameHeader(kind, correlation_id, meta_bytes, blob_bytes)
    _check_bounds(header)
    return header


def _check_bounds(header: FrameHeader) -> None:
    low = 0 if header.type in _OF_NO_REQUEST else 1
    if not low <= header.correlation_id <= MAX_CORRELATION_ID:
        raise ProtocolError(f"{header.type.name} with correlation id {header.correlation_id}")
    max_meta_bytes = MAX_ARENA_META_BYTES if header.type in _OF_ARENA else MAX_META_BYTES
    if not 0 < header.meta_bytes <= max_meta_bytes:
        raise ProtocolError(f"{header.type.name} with {header.meta_bytes} bytes of meta")
    if not 0 <= header.blob_bytes <= (MAX_BLOB_BYTES if header.type in _WITH_BLOB else 0):
        raise ProtocolError(f"{header.type.name} with a blob of {header.blob_bytes} bytes")


def _checksum(rest: bytes) -> int:
    return xxhash.xxh3_64_intdigest(rest) & _LOW_32_BITS
