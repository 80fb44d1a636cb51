"""The fuzz targets take their seeds and what is near them; the plain loops do what machine code
does, within the arrays.
"""

from __future__ import annotations

import functools
import random
from unittest import mock

import numpy as np
import pytest
from lmcache_core.serde.chunk_codec import CacheGenCodec, Profile

from tests.fuzz import __main__ as command
from tests.fuzz.plain_loops import Checked, plain_loops
from tests.fuzz.targets import (
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

NUM_DAMAGED = 40


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
def test_seeds_and_what_is_near_them_are_no_findings(name: str) -> None:
    target = TARGETS[name]
    seeds = list(target.seeds())
    assert len(seeds) == len(set(seeds)) > 1
    for number, seed in enumerate((b"", b"\0", *seeds)):
        target.run(seed)
        for i in range(NUM_DAMAGED):
            target.run(near(seed, 1000 * number + i))


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
