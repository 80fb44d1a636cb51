"""Quantised tensors, byte by byte, against the arithmetic of `docs/codec.md` written a second
time (`tests/fixtures/codec_reference.py`).
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lmcache_core.record import decoded_bytes
from lmcache_core.serde import create_codec
from lmcache_core.serde.codec import ChunkCodec, EncodedPayload
from lmcache_core.serde.quantised_blob import can_be_quantised
from lmcache_core.serde.tables import bell_curves

from tests.fixtures.codec_reference import (
    KINDS,
    WORDS,
    by_plane,
    by_token,
    choose,
    encoded_section,
    narrowed,
)
from tests.suites.codec_payloads import header_of, specs_of

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
FINENESS = {"cachegen:high": 144, "cachegen:low": 240}
BY_PLANE_FROM_TOKENS = 64


def power_of_two_from(number: float) -> int:
    return 1 << max(0, math.ceil(math.log2(number)))


def levels_of(shape: Shape) -> list[int]:
    """Of every plane: the documented bins."""
    sides, layers = shape[:2]
    fine = [10, 2] if layers >= 10 else [layers, layers]
    return [15 if layer < fine[side] else 7 for side in range(sides) for layer in range(layers)]


def specified(name: str, dtype: str, shape: Shape, words: Array) -> tuple[bytes, bytes]:
    """Return the blob of a tensor and its restored bytes."""
    tokens, channels = shape[2:]
    is_by_token = name == "cachegen" or tokens < BY_PLANE_FROM_TOKENS
    group = power_of_two_from(64 / tokens)
    section = min(channels, 128 * power_of_two_from(128 / tokens))
    levels = levels_of(shape) if is_by_token else [127] * (shape[0] * shape[1])
    scales, shifts, shapes, streams, restored = [], [], [], [], []
    for plane, most in zip(words.reshape(-1, tokens, channels), levels, strict=True):
        frequencies = bell_curves().of(most).frequencies
        quantised = (
            by_token(plane, dtype, most) if is_by_token else by_plane(plane, dtype, FINENESS[name])
        )
        assert quantised is not None
        chosen = choose(quantised.whole, most, group, is_by_token, frequencies)
        scales += quantised.scales
        shifts += chosen.shifts
        shapes += [
            table + 128 * is_delta
            for table, is_delta in zip(chosen.shapes, chosen.deltas, strict=True)
        ]
        columns = [chosen.shapes[channel // group] for channel in range(channels)]
        streams += [
            encoded_section(
                chosen.symbols[:, first : first + section] + most,
                columns[first : first + section],
                frequencies,
            )
            for first in range(0, channels, section)
        ]
        # A negative value of less than half a step comes back as +0: whole numbers have no sign.
        restored.append(np.where(quantised.whole == 0, 0, quantised.restored))
    whole_scales = np.array(scales, np.uint32)
    packed = narrowed(whole_scales.view(np.float32), dtype) if is_by_token else whole_scales
    kind, width = KINDS[dtype], words.itemsize
    head = struct.pack("<4s4B", b"KVB1", 2 if is_by_token else 3, kind, width, 0)
    blob = b"".join(
        (
            head,
            struct.pack("<4I", len(levels), tokens, channels, 0),
            bytes(levels),
            packed.tobytes(),
            np.array(shifts, "<i2").tobytes(),
            bytes(shapes),
            np.array([len(stream) for stream in streams], "<u4").tobytes(),
            *(np.array(stream, "<u2").tobytes() for stream in streams),
        )
    )
    return blob, np.array(restored, WORDS[dtype]).tobytes()


@functools.cache
def opened(name: str) -> ChunkCodec:
    codec = create_codec(name, threads=2)
    assert codec is not None
    codec.open()
    return codec


def encoded(name: str, dtype: str, shape: Shape, payload: bytes) -> EncodedPayload | None:
    return opened(name).encode(specs_of((dtype, shape)), memoryview(payload))


def values_of(kind: str, dtype: str, shape: Shape) -> Array:
    """Words of a tensor: noise about the mean of each channel, or something harder."""
    rng = np.random.default_rng(len(kind))
    noise = rng.standard_normal(shape) + 3 * rng.standard_normal((*shape[:2], 1, shape[3]))
    match kind:
        case "zero rows":
            noise[:, :, ::3] = 0.0
            noise[:, :, 1::3, ::2] = -0.0
        case "large" | "small":
            exponent = 11 if dtype == "float16" else 96
            noise *= 2.0 ** (exponent if kind == "large" else -exponent)
        case "of any size":
            noise *= 2.0 ** rng.integers(-12, 4, shape)
        case "a walk":
            noise = np.cumsum(noise, axis=2) / 8
        case "ties":
            noise = rng.integers(-29, 30, shape) / 2
            noise[..., 0] = 15
        case "far from the others":
            noise[:, :, shape[2] // 2, 1] = 30_000
        case _:
            assert kind == "noise"
    return narrowed(noise.astype(np.float32), dtype).reshape(shape)


def check(name: str, dtype: str, shape: Shape, words: Array) -> EncodedPayload:
    found = encoded(name, dtype, shape, words.tobytes())
    assert found is not None
    assert found.lossy
    blob, restored = specified(name, dtype, shape, words)
    assert bytes(found.payload) == blob
    out = bytearray(decoded_bytes(header_of(found)))
    opened(name).decode(header_of(found), found.payload, memoryview(out))
    assert bytes(out) == restored
    return found


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        *(("cachegen", "zero rows", dtype) for dtype in KINDS),
        ("cachegen", "of any size", "bfloat16"),
        ("cachegen", "ties", "float32"),
        *(("cachegen:high", "noise", dtype) for dtype in KINDS),
        ("cachegen:high", "of any size", "float16"),
        ("cachegen:low", "zero rows", "float16"),
        ("cachegen:low", "a walk", "bfloat16"),
    ],
)
def test_a_blob_and_its_values_are_those_of_the_specification(
    name: str, kind: str, dtype: str
) -> None:
    shape = (2, 1, 66, 20)
    check(name, dtype, shape, values_of(kind, dtype, shape))


@pytest.mark.parametrize("name", ["cachegen", "cachegen:low"])
@pytest.mark.parametrize("kind", ["large", "small"])
@pytest.mark.parametrize("dtype", KINDS)
def test_scales_may_be_far_from_one(name: str, kind: str, dtype: str) -> None:
    shape = (1, 1, 66, 20)
    check(name, dtype, shape, values_of(kind, dtype, shape))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cachegen", (1, 1, 1, 700)),
        ("cachegen", (1, 1, 7, 4200)),
        ("cachegen", (2, 12, 9, 33)),
        ("cachegen:high", (1, 1, 65, 300)),
    ],
)
def test_groups_and_sections_follow_from_the_shape(name: str, shape: Shape) -> None:
    check(name, "bfloat16", shape, values_of("a walk", "bfloat16", shape))


def test_the_step_grows_until_symbols_can_hold_the_widest_channel() -> None:
    shape = (1, 1, 1000, 24)
    check("cachegen:high", "float32", shape, values_of("far from the others", "float32", shape))


def test_differences_are_coded_where_they_save_more_than_a_sixteenth() -> None:
    """Squares that sum to 64, and squares of differences that sum to 60, or to 59."""
    runs = [[sign] * length + [0] for length in [2] * 13 + [3] * 2 for sign in (1, -1)]
    column = [number for run in runs for number in run]
    columns = [column, [0, *column[:-1]], [15] * len(column)]
    words = np.array(columns, np.float32).T.copy().view(np.uint32)
    found = check("cachegen", "float32", (1, 1, len(column), 3), words)
    shapes_at = 24 + 1 + 4 * len(column) + 2 * 3
    assert [shape >> 7 for shape in found.payload[shapes_at : shapes_at + 2]] == [0, 1]


@pytest.mark.parametrize(
    ("name", "dtype", "largest", "is_quantised"),
    [
        ("cachegen", "float32", 2.0**-100, True),
        ("cachegen", "float32", 2.0**-101, False),
        ("cachegen:low", "bfloat16", 2.0**100, True),
        ("cachegen:low", "bfloat16", 2.0**101, False),
        ("cachegen:low", "float16", 32768.0, True),
        ("cachegen:low", "float16", 32800.0, False),
        ("cachegen", "float16", 32800.0, True),
    ],
)
def test_a_scale_that_cannot_be_divided_by_is_left_without_loss(
    name: str, dtype: str, largest: float, is_quantised: bool
) -> None:
    shape = (2, 1, 65, 30)
    values = np.full(shape, largest, np.float32) * np.resize([1.0, 0.5, 0.25], 30)
    found = encoded(name, dtype, shape, narrowed(values.astype(np.float32), dtype).tobytes())
    assert found is not None
    assert found.lossy == is_quantised


@pytest.mark.parametrize(
    ("dtype", "shape", "is_quantised"),
    [
        ("bfloat16", (1, 4096, 64, 8), True),
        ("bfloat16", (1, 4097, 64, 8), False),
        ("bfloat16", (2, 2, 65, 4, 8), False),
        ("bfloat16", (1, 1, (1 << 15) + 1, 1), False),
        ("float8_e4m3fn", (2, 2, 65, 32), False),
    ],
)
def test_only_kv_of_some_dtypes_and_shapes_is_quantised(
    dtype: str, shape: Shape, is_quantised: bool
) -> None:
    payload = bytes(specs_of((dtype, shape))[0].length)
    found = encoded("cachegen", dtype, shape, payload)
    assert found is not None
    assert found.lossy == is_quantised


@pytest.mark.parametrize("shape", [(2, 2, 1, (1 << 20) + 1), (2, 32, 1 << 15, 1 << 10)])
def test_a_tensor_too_large_for_the_loops_is_not_quantised(shape: Shape) -> None:
    assert not can_be_quantised("bfloat16", shape)
