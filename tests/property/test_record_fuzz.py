"""Records from anywhere: only `RecordError` comes of bytes that are none, and nothing is ever
taken for what it is not.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmcache_core.errors import RecordError
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import (
    HEAD_ALIGN_BYTES,
    PREFIX_BYTES,
    Extension,
    RecordHeader,
    TensorSpec,
    decode_head,
    decode_prefix,
    encode_head,
    payload_digest,
    verify_payload,
)

from tests.suites.chunks import make_key, make_record

RECORD = make_record("fuzz", b"payload" * 50)

names = st.text(max_size=20)
dtypes = st.sampled_from(["uint8", "bfloat16", "float32"])


def read(data: bytes) -> RecordHeader:
    """Read a record as every reader does: prefix, head, payload."""
    prefix = decode_prefix(data[:PREFIX_BYTES])
    header, payload_bytes = decode_head(data[: prefix.head_bytes])
    verify_payload(header, data[prefix.head_bytes : prefix.head_bytes + payload_bytes])
    return header


def refused(data: bytes) -> bool:
    try:
        read(data)
    except RecordError:
        return True
    return False


def sealed(
    header: bytes, units: int | None = None, payload_bytes: int = 350, version: int = 1
) -> bytes:
    """A head with a right checksum around any header bytes."""
    needed = PREFIX_BYTES + len(header) + 16
    units = -(-needed // HEAD_ALIGN_BYTES) if units is None else units
    prefix = struct.pack("<4sHHIIQ", b"LMKV", version, units, len(header), 0, payload_bytes)
    covered = prefix + header + bytes(max(0, units * HEAD_ALIGN_BYTES - needed))
    return covered + xxhash.xxh3_128_digest(covered)


@given(st.binary(max_size=2000))
@example(b"")
@example(b"LMKV")
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert refused(data)


@given(st.integers(0, len(RECORD) - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(RECORD)
    data[at] ^= change
    assert refused(bytes(data))


@given(st.integers(0, len(RECORD) - 1))
def test_a_truncated_record_is_noticed(length: int) -> None:
    assert refused(RECORD[:length])


@given(
    st.lists(
        st.tuples(st.integers(0, len(RECORD)), st.binary(max_size=8), st.integers(0, 8)),
        min_size=1,
        max_size=5,
    )
)
def test_a_mutated_record_is_refused_or_the_same(edits: list[tuple[int, bytes, int]]) -> None:
    data = RECORD
    for at, inserted, num_deleted in edits:
        data = data[:at] + inserted + data[at + num_deleted :]
    assert refused(data) or data[: len(RECORD)] == RECORD


@given(st.binary(min_size=20, max_size=20))
def test_any_prefix_is_read_or_refused_and_within_bounds(rest: bytes) -> None:
    try:
        prefix = decode_prefix(b"LMKV" + rest)
    except RecordError:
        return
    assert PREFIX_BYTES < prefix.head_bytes <= 64 << 10
    assert prefix.header_bytes < prefix.head_bytes
    assert prefix.payload_bytes <= 4 << 30


KEY = make_key("fuzz").key.canonical()


@given(
    st.sampled_from([KEY, KEY[:-1], b"", bytes(5000)]),
    st.sampled_from(["naive", "", "x" * 200]),
    st.lists(
        st.tuples(
            names,
            st.sampled_from(["uint8", "no dtype", "x" * 1000]),
            st.lists(st.integers(-2, 1 << 41), max_size=9),
            st.integers(-1, 400),
            st.integers(-1, 400),
        ),
        max_size=4,
    ),
    st.sampled_from([16, 15, 0]),
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.binary(max_size=5)), max_size=70),
)
def test_fields_out_of_bounds_are_refused(
    key: bytes, serde: str, tensors: list[object], digest: int, extensions: list[object]
) -> None:
    encoded = msgspec.msgpack.encode([key, serde, "", False, tensors, bytes(digest), extensions])
    try:
        header, payload_bytes = decode_head(sealed(encoded))
    except RecordError:
        return
    assert header.key == KEY
    assert sum(spec.length for spec in header.tensors) <= payload_bytes
    assert not any(extension.must_understand for extension in header.extensions)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(names, dtypes, st.lists(st.integers(0, 5), max_size=8)), max_size=6),
    names.filter(bool),
    names,
    st.lists(st.tuples(st.integers(0, 1000), st.binary(max_size=30)), max_size=4),
)
def test_what_is_written_is_read(
    tensors: list[tuple[str, str, list[int]]],
    serde: str,
    profile: str,
    extensions: list[tuple[int, bytes]],
) -> None:
    specs, at = [], 0
    for group, dtype, shape in tensors:
        length = {"uint8": 1, "bfloat16": 2, "float32": 4}[dtype]
        for size in shape:
            length *= size
        specs.append(TensorSpec(group, dtype, tuple(shape), at, length))
        at += length
    payload = bytes(at)
    fields = tuple(Extension(number, False, data) for number, data in extensions)
    header = RecordHeader(KEY, serde, profile, False, tuple(specs), payload_digest(payload), fields)
    head = encode_head(header, at)
    assert len(head) % HEAD_ALIGN_BYTES == 0
    assert decode_head(head, CacheEngineKey.from_canonical(KEY)) == (header, at)
    assert read(head + payload) == header
