"""The header of a frame."""

from __future__ import annotations

import struct

import pytest
import xxhash
from lmcache_core.errors import ProtocolError
from lmcache_core.wire.frames import (
    HEADER_BYTES,
    MAX_ARENA_META_BYTES,
    MAX_BLOB_BYTES,
    MAX_META_BYTES,
    FrameHeader,
    FrameType,
    build_header,
    parse_header,
)


def with_checksum(data: bytes) -> bytes:
    """The bytes with the checksum that the specification asks for."""
    checksum = xxhash.xxh3_64_intdigest(data[:20] + data[24:32]) & 0xFFFFFFFF
    return data[:20] + struct.pack("<I", checksum) + data[24:]


def raw(
    magic: bytes = b"LMF1",
    kind: int = 12,
    reserved: bytes = bytes(3),
    correlation_id: int = 1,
    meta: int = 1,
    blob: int = 0,
) -> bytes:
    return with_checksum(
        struct.pack("<4sB3sQIIQ", magic, kind, reserved, correlation_id, meta, 0, blob)
    )


@pytest.mark.parametrize(
    "header",
    [
        FrameHeader(FrameType.PING, 1, 1, 0),
        FrameHeader(FrameType.CHUNK, (1 << 64) - 1, MAX_META_BYTES, MAX_BLOB_BYTES),
        FrameHeader(FrameType.PUT, 7, 1, 0),
        FrameHeader(FrameType.ERROR, 0, 20, 0),
    ],
)
def test_what_is_built_is_parsed(header: FrameHeader) -> None:
    data = build_header(header)
    assert len(data) == HEADER_BYTES
    assert parse_header(data) == header
    assert data == raw(
        kind=header.type,
        correlation_id=header.correlation_id,
        meta=header.meta_bytes,
        blob=header.blob_bytes,
    )


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw(magic=b"LMF2"), id="magic"),
        pytest.param(raw(kind=0), id="type 0"),
        pytest.param(raw(kind=33), id="type 33"),
        pytest.param(raw(kind=255), id="type 255"),
        pytest.param(raw(reserved=b"\0\0\1"), id="reserved"),
        pytest.param(raw(correlation_id=0), id="correlation id"),
        pytest.param(raw(meta=0), id="no meta"),
        pytest.param(raw(meta=MAX_META_BYTES + 1), id="meta too long"),
        pytest.param(raw(kind=23, meta=MAX_ARENA_META_BYTES + 1), id="meta of STAGE too long"),
        pytest.param(raw(kind=22, blob=1), id="a blob where extents belong"),
        pytest.param(raw(meta=0xFFFFFFFF), id="meta as long as it gets"),
        pytest.param(raw(blob=1), id="a blob where none belongs"),
        pytest.param(raw(kind=8, blob=MAX_BLOB_BYTES + 1), id="blob too long"),
        pytest.param(raw(kind=6, blob=(1 << 64) - 1), id="blob as long as it gets"),
        pytest.param(raw()[:-1], id="short"),
        pytest.param(raw() + b"\0", id="long"),
        pytest.param(b"", id="empty"),
    ],
)
def test_anything_out_of_bounds_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_header(data)


def test_every_flipped_bit_is_noticed() -> None:
    data = build_header(FrameHeader(FrameType.CHUNK, 9, 3, 1234))
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            parse_header(damaged)


def test_no_header_out_of_bounds_is_built() -> None:
    for header in (
        FrameHeader(FrameType.GET, 0, 1, 0),
        FrameHeader(FrameType.GET, 1 << 64, 1, 0),
        FrameHeader(FrameType.GET, 1, 1, 1),
    ):
        with pytest.raises(ProtocolError):
            build_header(header)
