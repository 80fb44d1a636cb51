"""Heads of records that no encoder writes."""

from __future__ import annotations

import struct

import pytest
import xxhash
from lmcache_core.errors import RecordError
from lmcache_core.record import HEAD_ALIGN_BYTES, PREFIX_BYTES, RecordReason, decode_head, decode_prefix
from lmcache_core.record.codec import CHECKSUM_BYTES
from lmcache_core.testing.chunks import make_record


def record_with(name: bytes, other: bytes) -> bytes:
    """The head of a record in which one name is another of the same length, under a right checksum."""
    record = make_record("a")
    covered = record[: decode_prefix(record[:PREFIX_BYTES]).head_bytes - CHECKSUM_BYTES]
    assert covered.count(name) == 1
    covered = covered.replace(name, other)
    return covered + xxhash.xxh3_128_digest(covered)


def test_the_replacement_alone_changes_nothing() -> None:
    header, payload_bytes = decode_head(record_with(b"naive", b"other"))
    assert (header.serde, payload_bytes) == ("other", 1000)


@pytest.mark.parametrize("name", [b"naive", b"uint8"])
@pytest.mark.parametrize("start", [b"\xff", b"\xc3", b"\xed\xa0\x80"])
def test_a_name_that_is_not_utf_8_is_refused(name: bytes, start: bytes) -> None:
    with pytest.raises(RecordError) as refused:
        decode_head(record_with(name, start + name[len(start) :]))
    assert refused.value.reason is RecordReason.HEADER


def test_a_header_nested_deeper_than_any_stack_is_refused() -> None:
    deep = b"\x91" * (50 << 10)
    units = -(-(PREFIX_BYTES + len(deep) + CHECKSUM_BYTES) // HEAD_ALIGN_BYTES)
    covered = struct.pack("<4sHHIIQ", b"LMKV", 1, units, len(deep), 0, 0) + deep
    covered += bytes(units * HEAD_ALIGN_BYTES - CHECKSUM_BYTES - len(covered))
    with pytest.raises(RecordError) as refused:
        decode_head(covered + xxhash.xxh3_128_digest(covered))
    assert refused.value.reason is RecordReason.HEADER
