"""Bounds of the header of a frame; headers that fit are in the golden vectors."""

from __future__ import annotations

import struct

import pytest
import xxhash
from lmcache_core.errors import ProtocolError
from lmcache_core.wire.frames import (
    MAX_ARENA_META_BYTES,
    MAX_BLOB_BYTES,
    MAX_META_BYTES,
    FrameHeader,
    FrameType,
    build_header,
    parse_header,
)


def raw(
    magic: bytes = b"LMF1",
    kind: int = 12,
    reserved: bytes = bytes(3),
    correlation_id: int = 1,
    meta: int = 1,
    blob: int = 0,
) -> bytes:
    """A header with the checksum that the specification asks for."""
    data = struct.pack("<4sB3sQIIQ", magic, kind, reserved, correlation_id, meta, 0, blob)
    checksum = xxhash.xxh3_64_intdigest(data[:20] + data[24:32]) & 0xFFFFFFFF
    return data[:20] + struct.pack("<I", checksum) + data[24:]


def test_header_is_as_specified() -> None:
    assert parse_header(raw()) == FrameHeader(FrameType.PING, 1, 1, 0)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw(magic=b"LMF2"), id="magic"),
        pytest.param(raw(kind=0), id="type 0"),
        pytest.param(raw(kind=33), id="type 33"),
        pytest.param(raw(reserved=b"\0\0\1"), id="reserved"),
        pytest.param(raw(correlation_id=0), id="correlation id"),
        pytest.param(raw(meta=0), id="no meta"),
        pytest.param(raw(meta=MAX_META_BYTES + 1), id="meta too long"),
        pytest.param(raw(kind=23, meta=MAX_ARENA_META_BYTES + 1), id="meta of STAGE too long"),
        pytest.param(raw(kind=22, blob=1), id="a blob where extents belong"),
        pytest.param(raw(blob=1), id="a blob where none belongs"),
        pytest.param(raw(kind=8, blob=MAX_BLOB_BYTES + 1), id="blob too long"),
        pytest.param(raw()[:-1], id="short"),
        pytest.param(raw() + b"\0", id="long"),
    ],
)
def test_header_out_of_bounds_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_header(data)


@pytest.mark.parametrize(
    "header",
    [
        FrameHeader(FrameType.GET, 0, 1, 0),
        FrameHeader(FrameType.GET, 1 << 64, 1, 0),
        FrameHeader(FrameType.GET, 1, 1, 1),
    ],
)
def test_header_out_of_bounds_is_not_built(header: FrameHeader) -> None:
    with pytest.raises(ProtocolError):
        build_header(header)
