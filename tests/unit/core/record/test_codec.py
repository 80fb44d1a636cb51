"""Heads of records that no encoder writes."""

from __future__ import annotations

import struct

import pytest
import xxhash
from lmcache_core.errors import RecordError
from lmcache_core.record import (
    HEAD_ALIGN_BYTES,
    PREFIX_BYTES,
    Extension,
    RecordHeader,
    RecordReason,
    TensorSpec,
    decode_head,
    decode_prefix,
    decoded_bytes,
    decoded_header,
    encode_head,
    payload_digest,
)
from lmcache_core.record.codec import CHECKSUM_BYTES

from tests.suites.chunks import make_key, make_record


def record_with(name: bytes, other: bytes) -> bytes:
    """Return the head of a record with another name of the same length and a right checksum."""
    record = make_record("a")
    covered = record[: decode_prefix(record[:PREFIX_BYTES]).head_bytes - CHECKSUM_BYTES]
    assert covered.count(name) == 1
    return sealed(covered.replace(name, other))


@pytest.mark.parametrize("name", [b"naive", b"uint8"])
@pytest.mark.parametrize("start", [b"\xff", b"\xed\xa0\x80"])
def test_a_name_that_is_not_utf_8_is_refused(name: bytes, start: bytes) -> None:
    assert decode_head(record_with(b"naive", b"other"))[0].serde == "other"
    with pytest.raises(RecordError) as refused:
        decode_head(record_with(name, start + name[len(start) :]))
    assert refused.value.reason is RecordReason.HEADER


def sealed(covered: bytes) -> bytes:
    return covered + xxhash.xxh3_128_digest(covered)


def covered_of(head: bytes) -> bytes:
    return head[:-CHECKSUM_BYTES]


def encoded_header(
    tensors: tuple[TensorSpec, ...], extensions: tuple[Extension, ...] = ()
) -> RecordHeader:
    return RecordHeader(
        make_key("a").key.canonical(),
        "encoded",
        "",
        False,
        tensors,
        payload_digest(b""),
        extensions,
    )


def test_padding_that_is_not_zero_is_refused() -> None:
    head = encode_head(encoded_header((TensorSpec("", "uint8", (9,), 0, 9),)), 9)
    header_end = PREFIX_BYTES + decode_prefix(head).header_bytes
    assert header_end < len(head) - CHECKSUM_BYTES, "there is padding"
    for at in (header_end, len(head) - CHECKSUM_BYTES - 1):
        covered = bytearray(covered_of(head))
        covered[at] = 1
        with pytest.raises(RecordError) as refused:
            decode_head(sealed(bytes(covered)))
        assert refused.value.reason is RecordReason.BOUNDS


def test_a_head_of_one_unit_too_many_is_refused() -> None:
    """Also where a whole unit is to spare, because the header fills the others exactly."""
    tensors = (TensorSpec("", "uint8", (9,), 0, 9),)
    for num_bytes in range(HEAD_ALIGN_BYTES):
        head = encode_head(encoded_header(tensors, (Extension(7, False, bytes(num_bytes)),)), 9)
        prefix = decode_prefix(head)
        spare = prefix.head_bytes - PREFIX_BYTES - prefix.header_bytes - CHECKSUM_BYTES
        longer = bytearray(covered_of(head) + bytes(HEAD_ALIGN_BYTES))
        struct.pack_into("<H", longer, 6, len(head) // HEAD_ALIGN_BYTES + 1)
        with pytest.raises(RecordError) as refused:
            decode_head(sealed(bytes(longer)))
        assert refused.value.reason is RecordReason.BOUNDS
        if spare == 0:
            return
    raise AssertionError("no header filled its units exactly")


@pytest.mark.parametrize(
    ("num_tensors", "num_dimensions", "num_extensions"), [(257, 1, 0), (1, 9, 0), (1, 1, 65)]
)
def test_counts_above_their_bounds_are_refused(
    num_tensors: int, num_dimensions: int, num_extensions: int
) -> None:
    def check(num_tensors: int, num_dimensions: int, num_extensions: int) -> None:
        shape = (1,) * num_dimensions
        tensors = tuple(TensorSpec("", "uint8", shape, at, 1) for at in range(num_tensors))
        extensions = tuple(Extension(at + 7, False, b"") for at in range(num_extensions))
        encoded_header(tensors, extensions).check(num_tensors)

    check(min(num_tensors, 256), min(num_dimensions, 8), min(num_extensions, 64))
    with pytest.raises(RecordError) as refused:
        check(num_tensors, num_dimensions, num_extensions)
    assert refused.value.reason is RecordReason.BOUNDS


@pytest.mark.parametrize("dimension", [-1, (1 << 40) + 1])
def test_dimensions_outside_their_bounds_are_refused(dimension: int) -> None:
    encoded_header((TensorSpec("", "uint8", (0, 1 << 40), 0, 9),)).check(9)
    with pytest.raises(RecordError, match="shape") as refused:
        encoded_header((TensorSpec("", "uint8", (0, dimension), 0, 9),)).check(9)
    assert refused.value.reason is RecordReason.BOUNDS


def test_payload_above_its_bound_is_refused() -> None:
    head = bytearray(encode_head(encoded_header((TensorSpec("", "uint8", (9,), 0, 9),)), 9))
    struct.pack_into("<Q", head, 16, 4 << 30)
    assert decode_prefix(head).payload_bytes == 4 << 30
    struct.pack_into("<Q", head, 16, (4 << 30) + 1)
    with pytest.raises(RecordError) as refused:
        decode_prefix(head)
    assert refused.value.reason is RecordReason.BOUNDS


@pytest.mark.parametrize("offset", [0, 5, 8])
def test_tensors_that_overlap_are_refused(offset: int) -> None:
    """Also encoded ones, whose lengths do not follow from their shapes."""
    first, second = TensorSpec("", "uint8", (4,), 0, 9), TensorSpec("", "uint8", (4,), 9, 11)
    encode_head(encoded_header((first, second)), 20)
    overlapping = TensorSpec("", "uint8", (4,), offset, 20 - offset)
    with pytest.raises(RecordError) as refused:
        encoded_header((first, overlapping)).check(20)
    assert refused.value.reason is RecordReason.BOUNDS


def test_decoded_tensors_lie_one_after_the_other() -> None:
    """With the lengths of their shapes, whatever lengths they had encoded."""
    encoded = encoded_header(
        (
            TensorSpec("full", "bfloat16", (2, 3, 5), 0, 7),
            TensorSpec("", "uint8", (0,), 7, 0),
            TensorSpec("window", "float32", (4,), 7, 100),
        )
    )
    header = decoded_header(encoded)
    assert [(spec.offset, spec.length) for spec in header.tensors] == [(0, 60), (60, 0), (60, 16)]
    header.check(decoded_bytes(encoded))


def test_a_header_nested_deeper_than_any_stack_is_refused() -> None:
    deep = b"\x91" * (50 << 10)
    units = -(-(PREFIX_BYTES + len(deep) + CHECKSUM_BYTES) // HEAD_ALIGN_BYTES)
    covered = struct.pack("<4sHHIIQ", b"LMKV", 1, units, len(deep), 0, 0) + deep
    covered += bytes(units * HEAD_ALIGN_BYTES - CHECKSUM_BYTES - len(covered))
    with pytest.raises(RecordError) as refused:
        decode_head(sealed(covered))
    assert refused.value.reason is RecordReason.HEADER
