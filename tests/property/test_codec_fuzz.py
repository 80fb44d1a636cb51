"""Blobs from anywhere: those that are none raise only `SerdeError`, nothing is written outside
`out`, and no claim takes memory or time.
"""

from __future__ import annotations

import functools
import struct
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import RecordHeader, TensorSpec
from lmcache_core.serde.chunk_codec import CacheGenCodec, Profile
from lmcache_core.serde.codec import CACHEGEN_SERDE
from lmcache_core.serde.tables import bell_curves

from tests.fuzz.damage import Changes, changed, changes
from tests.suites.codec_payloads import decode_between_guards, kv_payload, specs_of

TENSORS = (
    (Profile.STANDARD, ("bfloat16", (2, 2, 20, 30))),
    (Profile.STANDARD, ("float32", (1, 2, 64, 9))),
    (Profile.HIGH, ("float16", (2, 1, 70, 12))),
    (Profile.LOW, ("bfloat16", (1, 2, 130, 9))),
    (None, ("bfloat16", (2, 1, 64, 9))),
    (None, ("uint8", (3000,))),
)
MEMORY_BOUND_BYTES = 2 << 20
"""Many times the longest blob and the largest tensor here; a thousandth of what heads may claim."""
TIME_BOUND_S = 5.0

cases = st.integers(0, len(TENSORS) - 1)


@functools.cache
def reader() -> CacheGenCodec:
    """Its threads have worked once, so that what they keep is not counted."""
    codec = CacheGenCodec(Profile.LOW, 2)
    codec.open()
    for number in range(len(TENSORS)):
        for _ in range(4):
            read(codec, number, blob_of(number))
    return codec


@functools.cache
def blob_of(number: int) -> bytes:
    profile, tensor = TENSORS[number]
    codec = CacheGenCodec(profile, 1)
    codec.open()
    specs = specs_of(tensor)
    found = codec.encode(specs, memoryview(kv_payload(specs, number)))
    codec.close()
    assert found is not None
    assert found.lossy == (profile is not None)
    return bytes(found.payload)


def read(codec: CacheGenCodec, number: int, data: bytes) -> bytes:
    _, (dtype, shape) = TENSORS[number]
    spec = TensorSpec("", dtype, shape, 0, len(data))
    header = RecordHeader(b"", CACHEGEN_SERDE, f"low@{bell_curves().id}", True, (spec,), b"")
    return decode_between_guards(codec, header, memoryview(data))


def read_within_bounds(number: int, data: bytes) -> bytes | None:
    """What is decoded, None if it is refused; anything else, much memory or a long time fails
    the test.
    """
    codec = reader()
    tracemalloc.start()
    began = time.process_time()
    try:
        return read(codec, number, data)
    except SerdeError:
        return None
    finally:
        assert time.process_time() - began < TIME_BOUND_S
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY_BOUND_BYTES


@settings(deadline=None, max_examples=300)
@given(cases, changes)
def test_a_damaged_blob_is_refused_or_decoded(number: int, changes: Changes) -> None:
    """Heads, levels, scales, tables, lengths and streams, each where it lies."""
    found = read_within_bounds(number, changed(blob_of(number), changes))
    _, (dtype, shape) = TENSORS[number]
    assert found is None or len(found) == num_bytes(shape, dtype)


@settings(deadline=None)
@given(
    cases,
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([0, 1, 2, 4, 8, 255]),
    st.lists(
        st.integers(0, 70)
        | st.integers((1 << 32) - 3, (1 << 32) - 1)
        | st.integers(1 << 14, 1 << 18),
        min_size=4,
        max_size=4,
    ),
    st.booleans(),
    st.binary(max_size=800),
)
def test_any_head_is_refused_or_true(
    number: int, mode: int, dtype: int, itemsize: int, sizes: list[int], fits: bool, body: bytes
) -> None:
    _, (_, shape) = TENSORS[number]
    if fits and len(shape) == 4:
        sizes = [shape[0] * shape[1], shape[2], shape[3], 0]
    head = struct.pack("<4s4B4I", b"KVB1", mode, dtype, itemsize, 0, *sizes)
    found = read_within_bounds(number, head + body)
    assert found is None or (mode == 0 and found == body)


@pytest.mark.parametrize(
    ("dtype", "shape", "head"),
    [
        ("uint8", (64 << 20,), (1, 0, 1, 64 << 20, 0, 1, 0)),
        ("uint8", (64 << 20,), (1, 0, 1, 64 << 20, 0, 1 << 14, 0)),
        ("bfloat16", (32 << 20,), (1, 1, 2, 32 << 20, 0, 1 << 18, 0)),
        ("bfloat16", (2, 4096, 64, 64), (2, 0, 2, 8192, 64, 64, 0)),
        ("bfloat16", (16, 4096, 1, 512), (2, 0, 2, 65536, 1, 512, 0)),
        ("float32", (1, 1, 1 << 14, 1 << 10), (3, 2, 4, 1, 1 << 14, 1 << 10, 0)),
    ],
)
@pytest.mark.parametrize("body_bytes", [0, 1000, 200_000])
def test_a_large_tensor_of_a_short_blob_takes_no_memory(
    dtype: str, shape: tuple[int, ...], head: tuple[int, ...], body_bytes: int
) -> None:
    """All but the tensor itself, which its reader has bounded before."""
    codec = reader()
    mode, kind, itemsize, *sizes = head
    data = struct.pack("<4s4B4I", b"KVB1", mode, kind, itemsize, 0, *sizes) + b"\1" * body_bytes
    spec = TensorSpec("", dtype, shape, 0, len(data))
    header = RecordHeader(b"", CACHEGEN_SERDE, f"low@{bell_curves().id}", True, (spec,), b"")
    out = memoryview(bytearray(num_bytes(shape, dtype)))
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(SerdeError):
            codec.decode(header, memoryview(data), out)
        assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 8 * body_bytes
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < TIME_BOUND_S


def test_one_thread_of_a_tensor_that_fails_leaves_the_codec_usable() -> None:
    for number in range(len(TENSORS)):
        blob = blob_of(number)
        expected = read(reader(), number, blob)
        for at in range(24, len(blob), max(1, len(blob) // 40)):
            damaged = blob[:at] + bytes([blob[at] ^ 0x40]) + blob[at + 1 :]
            read_within_bounds(number, damaged)
        assert read(reader(), number, blob) == expected
