"""Restored values: those of the documented algorithm where that is promised, those of the
specification elsewhere, to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from lmcache_core.documented.cachegen.quantization import (
    do_dequantize,
    torch_quant_vectorized,
)
from lmcache_core.record import decoded_bytes
from lmcache_core.serde import create_codec
from lmcache_core.serde.cachegen import CacheGenConfig
from lmcache_core.serde.machine_code import load_loops

from tests.fixtures import codec_reference
from tests.fixtures.codec_reference import KINDS, WORDS, Chosen, Quantised
from tests.suites.codec_payloads import header_of, kv_payload, specs_of
from tests.suites.serde_suite import bits_of

Array = npt.NDArray[Any]
DTYPES = list(KINDS)


def through_codec(name: str, dtype: str, shape: tuple[int, ...], payload: bytes) -> bytes:
    codec = create_codec(name)
    assert codec is not None
    codec.open()
    try:
        found = codec.encode(specs_of((dtype, shape)), memoryview(payload))
        assert found is not None
        assert found.lossy
        out = bytearray(decoded_bytes(header_of(found)))
        codec.decode(header_of(found), found.payload, memoryview(out))
        return bytes(out)
    finally:
        codec.close()


def documented(dtype: str, shape: tuple[int, ...], payload: bytes) -> bytes:
    """What the documented functions make of keys and values."""
    kv = torch.frombuffer(bytearray(payload), dtype=getattr(torch, dtype)).reshape(shape)
    config = CacheGenConfig.for_num_layers(shape[1])
    sides = []
    for side, bins in zip(kv, (config.bins_of_keys(), config.bins_of_values()), strict=True):
        quantised, maxes = torch_quant_vectorized(torch.tensor(bins), side)
        sides.append(do_dequantize(quantised, torch.tensor(bins), maxes, kv.dtype))
    return bits_of(torch.stack(sides))


def kv_of(dtype: str, shape: tuple[int, ...], kind: str) -> bytes:
    """Keys and values: as they come, with rows of zeros, large or small, or any bits that are
    finite.
    """
    payload = kv_payload(specs_of((dtype, shape)), 3)
    words = np.frombuffer(payload, WORDS[dtype]).copy()
    if kind == "zero rows":
        words.reshape(-1, shape[-1])[::3] = 0
        words.reshape(-1, shape[-1])[1::3, ::2] = 1 << (8 * words.itemsize - 1)
    elif kind in ("large", "small"):
        factor = {"bfloat16": 2.0**96, "float16": 2.0**11, "float32": 2.0**96}[dtype]
        values = codec_reference.widened(words, dtype) * np.float32(
            factor if kind == "large" else 1 / factor / 4
        )
        words = codec_reference.narrowed(values, dtype)
    elif kind == "any size":
        words = np.random.default_rng(5).integers(
            0, np.iinfo(words.dtype).max, words.size, words.dtype, endpoint=True
        )
        values = np.abs(codec_reference.widened(words, dtype))
        with np.errstate(invalid="ignore"):
            words[~(values <= 2.0**100) | (values < 2.0**-100)] = 0
    return words.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2, 70, 40), (2, 12, 9, 33), (2, 1, 1, 200)])
@pytest.mark.parametrize("kind", ["usual", "zero rows", "large", "small", "any size"])
def test_cachegen_restores_the_documented_values(
    dtype: str, shape: tuple[int, ...], kind: str
) -> None:
    payload = kv_of(dtype, shape, kind)
    expected = np.frombuffer(documented(dtype, shape, payload), WORDS[dtype])
    found = np.frombuffer(through_codec("cachegen", dtype, shape, payload), WORDS[dtype])
    # where a row is all zeros the documented algorithm has C - C, which is +0, and so have we
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "fineness"), [("cachegen:high", 144), ("cachegen:low", 240)])
@pytest.mark.parametrize("kind", ["usual", "zero rows", "small", "any size"])
def test_profiles_of_our_own_restore_whole_steps(
    dtype: str, name: str, fineness: int, kind: str
) -> None:
    shape = (2, 2, 65, 20)
    payload = kv_of(dtype, shape, kind)
    if dtype == "float16" and kind == "any size":
        payload = (np.frombuffer(payload, np.uint16) & np.uint16(0xF7FF)).tobytes()
    planes = np.frombuffer(payload, WORDS[dtype]).reshape(-1, *shape[2:])
    expected = [codec_reference.by_plane(plane, dtype, fineness) for plane in planes]
    assert all(isinstance(plane, Quantised) for plane in expected)
    found = np.frombuffer(through_codec(name, dtype, shape, payload), WORDS[dtype]).reshape(
        planes.shape
    )
    for plane, restored in zip(expected, found, strict=True):
        assert plane is not None
        # a negative value less than half a step from zero comes back as -0 from -0 · s, and as +0
        # from a whole number that has no sign
        unsigned = np.where(plane.whole == 0, 0, plane.restored)
        np.testing.assert_array_equal(restored, unsigned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [1, 7, 15, 127])
@pytest.mark.parametrize("is_by_token", [True, False])
def test_any_symbols_are_restored_as_written(dtype: str, levels: int, is_by_token: bool) -> None:
    """Whatever shifts and scales say: a decoder takes them from anywhere."""
    rng = np.random.default_rng(levels)
    tokens, channels = 20, 30
    for extreme in (False, True):
        shifts = rng.integers(
            -32768 if extreme else -levels, 32768 if extreme else levels + 1, channels
        )
        scales = rng.integers(
            0, 0x7F800000 if extreme else 0x43000000, tokens if is_by_token else 1, np.uint32
        )
        if is_by_token and dtype != "float32":
            scales = codec_reference.widened(
                rng.integers(0, 0x7800 if dtype == "float16" else 0x7E00, tokens, np.uint16), dtype
            ).view(np.uint32)
        if dtype != "float32":
            shifts = shifts % 100 - 50
            scales = np.minimum(scales, np.uint32(0x42000000))
        elif extreme:
            scales = np.minimum(scales, np.uint32(0x70000000))
        symbols, deltas = (
            rng.integers(0, 2 * levels + 1, (tokens, channels)),
            rng.integers(0, 2, channels),
        )
        columns = np.stack([shifts, -deltas, np.full(channels, 77)]).astype(np.int32)
        raw, scratch = (
            np.full(tokens * channels, 0xA5A5, WORDS[dtype]),
            np.full(channels, 0xFFFFFFFF, np.uint32),
        )
        shape = tokens, channels, KINDS[dtype], levels, int(is_by_token)
        load_loops().restore(
            symbols.astype(np.uint8).ravel(), raw, shape, scales.copy(), columns, scratch
        )
        chosen = Chosen(shifts.tolist(), [bool(delta) for delta in deltas], [], symbols - levels)
        expected = restored_without_folding(chosen, scales, dtype, levels, is_by_token)
        np.testing.assert_array_equal(raw.reshape(tokens, channels), expected)


def restored_without_folding(
    chosen: Chosen, scales: Array, dtype: str, levels: int, is_by_token: bool
) -> Array:
    """As the reference, but that a sum with a shift from anywhere is folded once only, as the
    loop does it.
    """
    tokens, channels = chosen.symbols.shape
    whole = np.zeros((tokens, channels), np.int64)
    size = 2 * levels + 1
    for i in range(channels):
        before = 0
        for token in range(tokens):
            symbol = int(chosen.symbols[token, i])
            before = codec_reference.folded(before + symbol, levels) if chosen.deltas[i] else symbol
            value = before + chosen.shifts[i]
            if is_by_token:
                value = value - size if value > levels else value
                value = value + size if value < -levels else value
            whole[token, i] = value
    scale = scales.view(np.float32)[:, None]
    numbers = whole.astype(np.float32)
    return codec_reference.narrowed(
        (numbers / np.float32(levels)) * scale if is_by_token else numbers * scale, dtype
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_the_dtype_is_to_the_nearest_even(dtype: str) -> None:
    """Every value of the dtype times 1, and ties between it and the next: one symbol, any scale."""
    ties = np.arange(1, 0x7C00 if dtype == "float16" else 0x7F00, 7, dtype=np.uint16)
    low, high = (
        codec_reference.widened(ties, dtype),
        codec_reference.widened(ties + np.uint16(1), dtype),
    )
    with np.errstate(over="ignore", under="ignore"):
        middle = ((low.astype(np.float64) + high.astype(np.float64)) / 2).astype(np.float32)
        scales = np.concatenate(
            [
                low,
                middle,
                np.nextafter(middle, np.float32(0)),
                np.nextafter(middle, np.float32(np.inf)),
            ]
        )
    scales = scales[np.isfinite(scales)]
    raw, columns = np.zeros(len(scales), np.uint16), np.zeros((3, 1), np.int32)
    shape = len(scales), 1, KINDS[dtype], 1, 1
    load_loops().restore(
        np.full(len(scales), 2, np.uint8),
        raw,
        shape,
        scales.view(np.uint32).copy(),
        columns,
        np.zeros(1, np.uint32),
    )
    np.testing.assert_array_equal(raw, codec_reference.narrowed(scales, dtype))
    if dtype == "bfloat16":
        assert bits_of(torch.from_numpy(scales).to(torch.bfloat16)) == raw.tobytes()
