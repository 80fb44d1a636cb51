"""The fuzz targets take their seeds and what is near them; the plain loops do what machine code
does, within the arrays.
"""

from __future__ import annotations

import functools
import random
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.serde.chunk_codec import CacheGenCodec, Profile
from lmcache_core.wire.frames import FrameType

from tests.fixtures.time_bound import cpu_bound
from tests.fuzz import __main__ as command
from tests.fuzz.damage import Changes, changed, changes
from tests.fuzz.plain_loops import Checked, plain_loops
from tests.fuzz.targets import (
    FRAME_TYPES,
    TARGETS,
    TENSORS,
    decode_blob,
    seeds_of_blobs,
)
from tests.suites.codec_payloads import (
    decode_between_guards,
    header_of,
    kv_payload,
    specs_of,
)

MEMORY_BOUND_BYTES = dict.fromkeys(TARGETS, 8 << 20) | {"pods": 256 << 20}
"""Many times the longest input, and a small part of what some inputs claim. A pod's texts are
repeated.
"""
TIME_BOUND_S = 30.0
HOSTILE = {
    "record-heads": [
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x97\xdb\xff\xff\xff\xff",
        b"\x97\xc6\xff\xff\xff\xff",
        b"\x97\xa1\xff",
        b"\x97\xc4\x01a\xa1n\xa0\xc2\xdd\x7f\xff\xff\xff" + b"\x95" * 400,
        bytes([0x91]) * 600,
    ],
    "messages": [
        bytes([FRAME_TYPES.index(kind)]) + meta
        for kind, meta in (
            (FrameType.CONTAINS, b"\x91\xdd\xff\xff\xff\xff"),
            (FrameType.CONTAINS, b"\x91\xdc\xff\xff" + b"\xc4\x00" * 65535),
            (FrameType.HELLO, b"\x95\x01\x01\xdd\xff\xff\xff\xff"),
            (FrameType.GET, b"\x93\x91\x92\x00\xc6\xff\xff\xff\xff"),
            (FrameType.LANE, b"\x92\x00\x95\xdb\xff\xff\xff\xff"),
            (FrameType.ERROR, b"\x92\xa2\xff\xfe\xa0"),
        )
    ],
}
"""Inputs that claim much, or are no text."""


@functools.cache
def seeds_of(name: str) -> list[bytes]:
    return [b"", b"\0", *TARGETS[name].seeds(), *HOSTILE.get(name, ())]


def run_within_bounds(name: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        with cpu_bound(TIME_BOUND_S):
            TARGETS[name].run(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BOUND_BYTES[name]
    finally:
        tracemalloc.stop()


def near(seed: bytes, number: int) -> bytes:
    """A seed with a byte changed, put in or left out."""
    dice = random.Random(number)
    at = dice.randrange(len(seed) + 1)
    return (
        seed[:at]
        + dice.choice([b"", b"\0", b"\xff", dice.randbytes(1)])
        + seed[at + dice.randrange(2) :]
    )


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read_within_bounds(name: str) -> None:
    seeds = seeds_of(name)
    assert len(seeds) == len(set(seeds)) > 3
    for seed in seeds:
        run_within_bounds(name, seed)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=200, deadline=None)
@given(number=st.integers(0, 1 << 16), changes=changes)
def test_damaged_seeds_are_read_within_bounds(name: str, number: int, changes: Changes) -> None:
    seeds = seeds_of(name)
    run_within_bounds(name, changed(seeds[number % len(seeds)], changes))


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=2000))
def test_any_bytes_are_read_within_bounds(name: str, data: bytes) -> None:
    run_within_bounds(name, data)


def test_the_command_knows_every_target() -> None:
    assert list(TARGETS) == list(command.TARGETS)
    assert set(command.WITH_LOOPS) <= set(TARGETS)


@functools.cache
def plain_codec(profile: Profile | None) -> CacheGenCodec:
    with mock.patch("lmcache_core.serde.chunk_codec.load_loops", plain_loops):
        codec = CacheGenCodec(profile, 1)
        codec.open()
        return codec


@pytest.mark.parametrize("profile", [*Profile, None])
def test_plain_loops_encode_and_decode_the_same(profile: Profile | None) -> None:
    """Every index that they use lies within its array."""
    compiled, plain = CacheGenCodec(profile, 1), plain_codec(profile)
    compiled.open()
    tensors = (
        *TENSORS,
        ("bfloat16", (2, 1, 3, 130)),
        ("float32", (1, 1, 66, 5)),
        ("bfloat16", (1, 1, 3, 300)),
        ("int32", (70,)),
    )
    for i, tensor in enumerate(tensors):
        specs = specs_of(tensor)
        payload = memoryview(kv_payload(specs, i))
        ours, theirs = compiled.encode(specs, payload), plain.encode(specs, payload)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert bytes(ours.payload) == bytes(theirs.payload)
            assert ours.report == theirs.report
            header = header_of(ours)
            assert decode_between_guards(plain, header, ours.payload) == decode_between_guards(
                compiled, header, ours.payload
            )
    compiled.close()


def test_plain_loops_stay_within_their_arrays_whatever_is_read() -> None:
    codec = plain_codec(Profile.LOW)
    for number, seed in enumerate(seeds_of_blobs()):
        for i in range(3):
            decode_blob(codec, near(seed, 1000 * number + i))


def test_checked_arrays_refuse_what_lies_outside() -> None:
    array = np.arange(6).view(Checked)
    assert (array[0], array[5], array[2:4].tolist(), array[np.uint64(1)]) == (0, 5, [2, 3], 1)
    assert isinstance(array[1:], Checked)
    for index in (-1, np.int64(-1), 6, slice(-2, None), (slice(0, 1), -1)):
        with pytest.raises(IndexError):
            array[index]
    with pytest.raises(IndexError):
        array[-1] = 0
