"""Quantising, bit by bit: against slow arithmetic of whole arrays, at ties, at zero, at the ends
of each dtype.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lmcache_core.serde import values
from lmcache_core.serde.machine_code import load_loops
from lmcache_core.serde.values import NOT_FINITE, OK

from tests.fixtures import codec_reference
from tests.fixtures.codec_reference import KINDS, WORDS, Quantised, widened

Array = npt.NDArray[Any]
DTYPES = list(KINDS)
LEVELS = [1, 7, 15, 127]
FINENESSES = [1, 64, 144, 240, 256, 1024]


def quantise(words: Array, dtype: str, how: int, loop: str) -> tuple[int, Quantised]:
    tokens, channels = words.shape
    whole = np.full(words.size, 0x7A7A, np.int16)
    scales = np.full(tokens if loop == "quantise_by_token" else 1, 0xA5A5A5A5, np.uint32)
    errors, scratch = np.zeros(3, np.int64), np.full(2 * channels, 0xFFFFFFFF, np.uint32)
    raw = words.ravel().copy()
    raw.setflags(write=False)
    status = getattr(load_loops(), loop)(
        raw, (tokens, channels, KINDS[dtype], how), whole, scales, errors, scratch
    )
    largest, squares, power = errors.tolist()
    return status, Quantised(
        whole.reshape(words.shape), scales.tolist(), (largest, squares, power), words
    )


def check(words: Array, dtype: str, how: int, loop: str) -> None:
    expected = getattr(codec_reference, loop.removeprefix("quantise_"))(words, dtype, how)
    status, found = quantise(words, dtype, how, loop)
    assert status == (NOT_FINITE if expected is None else OK)
    if expected is not None:
        np.testing.assert_array_equal(found.whole, expected.whole)
        assert found.scales == expected.scales
        assert found.errors == expected.errors


def words_of(numbers: Array, dtype: str) -> Array:
    return codec_reference.narrowed(np.ascontiguousarray(numbers, np.float32), dtype)


def hex_row(*numbers: str) -> Array:
    return np.array([[float.fromhex(number) for number in numbers]], np.float32)


def spread_out(dtype: str, seed: int, tokens: int = 9, channels: int = 37) -> Array:
    """Values of very different sizes, some of them zero, some rows of zeros."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((tokens, channels)) * 2.0 ** rng.integers(
        -12, 4, (tokens, channels)
    )
    numbers[rng.random((tokens, channels)) < 0.1] = 0.0
    numbers[1] = -0.0
    return words_of(numbers, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", LEVELS)
def test_by_token_is_as_written(dtype: str, levels: int) -> None:
    for seed in range(4):
        check(spread_out(dtype, seed), dtype, levels, "quantise_by_token")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fineness", FINENESSES)
def test_by_plane_is_as_written(dtype: str, fineness: int) -> None:
    for seed in range(4):
        check(spread_out(dtype, seed), dtype, fineness, "quantise_by_plane")
        steady = np.random.default_rng(seed).standard_normal((70, 5)) + 4 * np.arange(5)
        check(words_of(steady, dtype), dtype, fineness, "quantise_by_plane")
        check(words_of(steady.reshape(1, -1), dtype), dtype, fineness, "quantise_by_plane")


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_channels_than_are_summed_at_a_time(dtype: str) -> None:
    for channels in (255, 256, 257, 513):
        check(
            words_of(np.random.default_rng(channels).standard_normal((5, channels)), dtype),
            dtype,
            144,
            "quantise_by_plane",
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_by_token_go_to_the_even_one_of_the_shifted_values(dtype: str) -> None:
    """((x * 7) / 7) + 7 is rounded, so that it is 7.5 that goes to 8, and 8.5 as well."""
    row = hex_row(
        "0x1.cp+2",
        "0x1p-1",
        "0x1.8p+0",
        "0x1.4p+1",
        "0x1.cp+1",
        "0x1.ap+2",
        "-0x1p-1",
        "-0x1.8p+0",
        "-0x1.ap+2",
        "0x0p+0",
    )
    status, found = quantise(words_of(row, dtype), dtype, 7, "quantise_by_token")
    assert status == OK
    assert found.whole.tolist() == [[7, 1, 1, 3, 3, 7, -1, -1, -7, 0]]
    row = hex_row("0x1.ep+3", "0x1p-1", "0x1.8p+0", "0x1.dp+3", "-0x1p-1", "-0x1.8p+0", "-0x1.dp+3")
    status, found = quantise(words_of(row, dtype), dtype, 15, "quantise_by_token")
    assert status == OK
    assert found.whole.tolist() == [[15, 1, 1, 15, -1, -1, -15]]


def test_ties_by_plane_go_to_the_even_value() -> None:
    """The largest value is 32767 units of 1, and the step two of them."""
    numbers = np.array([[32767, -3, 1], [32767, 3, -1], [32767, -3, 5], [32767, 3, -5]], np.float32)
    status, found = quantise(numbers.view(np.uint32), "float32", 256, "quantise_by_plane")
    assert status == OK
    assert np.array(found.scales, np.uint32).view(np.float32).tolist() == [2.0]
    assert found.whole.tolist() == [[16384, -2, 0], [16384, 2, 0], [16384, -2, 2], [16384, 2, -2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", ["quantise_by_token", "quantise_by_plane"])
def test_nothing_but_zeros(dtype: str, loop: str) -> None:
    words = words_of(np.array([[0.0, -0.0, 0.0]] * 4), dtype)
    status, found = quantise(words, dtype, 15, loop)
    assert status == OK
    assert not found.whole.any()
    assert not any(found.scales)
    assert found.errors == (0, 0, 0)


@pytest.mark.parametrize("loop", ["quantise_by_token", "quantise_by_plane"])
def test_every_float16_but_the_largest(loop: str) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    finite = words[
        np.isfinite(words.view(np.float16)) & (np.abs(widened(words, "float16")) <= 2**15)
    ]
    rows = np.resize(np.random.default_rng(0).permutation(finite), (256, 240))
    check(rows, "float16", 15, loop)


@pytest.mark.parametrize("exponent", [-133, -126, -101, -100, -99, -14, 0, 15, 99, 100, 101, 127])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("loop", ["quantise_by_token", "quantise_by_plane"])
def test_scales_up_to_the_ends_are_divided_by_and_no_others(
    exponent: int, dtype: str, loop: str
) -> None:
    smaller = [1.0, -0.75, 0.4140625, 2.0**-7, -(2.0**-20), 2.0**-33]
    numbers = np.array([[math.ldexp(number, exponent) for number in smaller]] * 3, np.float64)
    with np.errstate(under="ignore"):
        words = words_of(numbers.astype(np.float32), dtype)
    expected = OK if -100 <= exponent <= 100 else NOT_FINITE
    assert quantise(words, dtype, 15, loop)[0] == expected
    check(words, dtype, 15, loop)


@pytest.mark.parametrize("largest", [2.0**-24, 2.0**-14, 32752.0, 32768.0, 32800.0, 65504.0])
def test_float16_by_plane_stays_finite(largest: float) -> None:
    words = words_of(np.array([[largest, -largest / 2], [largest / 4, largest]]), "float16")
    status, _ = quantise(words, "float16", 144, "quantise_by_plane")
    assert status == (OK if largest <= 2**15 else NOT_FINITE)
    check(words, "float16", 144, "quantise_by_plane")
    check(words, "float16", 15, "quantise_by_token")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", ["quantise_by_token", "quantise_by_plane"])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found_wherever_it_is(dtype: str, loop: str, number: float) -> None:
    for place in range(12):
        numbers = np.ones((3, 4), np.float32)
        numbers[place // 4, place % 4] = number
        bits = (
            numbers.view(np.uint32)
            if dtype == "float32"
            else (numbers.view(np.uint32) >> 16).astype(np.uint16)
        )
        words = numbers.astype(np.float16).view(np.uint16) if dtype == "float16" else bits
        assert quantise(words, dtype, 15, loop)[0] == NOT_FINITE


def test_values_by_plane_span_what_symbols_can_hold() -> None:
    """One far value in a channel of small ones: the step grows until 254 steps are enough."""
    for fineness in (1, 144):
        for tokens in (65, 1000):
            numbers = np.random.default_rng(tokens).standard_normal((tokens, 3)).astype(np.float32)
            numbers[tokens // 2, 1] = 3e6
            words = numbers.view(np.uint32)
            check(words, "float32", fineness, "quantise_by_plane")
            whole = quantise(words, "float32", fineness, "quantise_by_plane")[1].whole
            assert (whole.max(0) - whole.min(0)).max() <= 254


@pytest.mark.parametrize("square", [0, 1, 2, 3, 4, 15, 16, 17, (1 << 52) - 1])
def test_roots_are_whole(square: int) -> None:
    assert values._root(square) == math.isqrt(square)


def test_roots_next_to_squares_are_whole() -> None:
    for root in (*range(1, 3000), 94906265, 67108863, 67108862, 3 << 24):
        for square in (root * root - 1, root * root, root * root + 1):
            if square < 1 << 52:
                assert values._root(square) == math.isqrt(square)


def test_words_and_types_in_the_reference_are_those_of_the_loops() -> None:
    assert {dtype: WORDS[dtype]().itemsize for dtype in DTYPES} == {
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
    }
    assert tuple(KINDS.values()) == (values.BFLOAT16, values.FLOAT16, values.FLOAT32)
