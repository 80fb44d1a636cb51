"""Floating-point KV to whole numbers and back: loops over the rows of one plane (one layer of keys
or of values).

Every operation is one of IEEE 754 in float32, in the order written here, nothing fused, rounded to
nearest, ties to even. Sums are of integers, so that their order is free. That makes the result the
same on every machine and on a GPU. Compiled by `machine_code.compiled`.

Raw values are uint16 (bfloat16, float16) or uint32 (float32) bit patterns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int16, int32, int64, uint32
from numba.extending import register_jitable

from lmcache_core.serde.tables import BFLOAT16, FLOAT16, FLOAT32

UNIT = 32767
"""Errors and values are summed in whole parts of 1/UNIT of their scale."""
MAX_SPREAD = 252
"""Steps between the smallest and the largest value of a channel, at most; symbols have room for
254.
"""
_TO_WHOLE = np.float32(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a float32 below 2^22 to a whole number, ties to
even.
"""
_FLOAT16_UP = np.float32(2.0**112)
_SMALLEST_BITS = 27 << 23
"""2^-100, and"""
_LARGEST_BITS = 227 << 23
"""2^100: scales outside are not divided by."""
_LARGEST_HALF_BITS = 142 << 23
"""2^15: in float16, values up to here and half a step beyond stay finite when the step is at
most as large as they are.
"""
OK, NOT_FINITE = 0, 1
_BLOCK = 256
"""Channels whose sums are kept at a time: they stay in the first-level cache."""

_READ_ONLY = "Array({}, 1, 'C', readonly=True)"
_QUANTISE_ARRAYS = "UniTuple(int64, 4), int16[::1], uint32[::1], int64[::1], uint32[::1])"
_RESTORE_ARRAYS = "UniTuple(int64, 5), uint32[::1], int32[:, ::1], uint32[::1])"
QUANTISE_SIGNATURES = tuple(
    f"int64({_READ_ONLY.format(raw)}, {_QUANTISE_ARRAYS}" for raw in ("uint16", "uint32")
)
RESTORE_SIGNATURES = tuple(
    f"void(uint8[::1], {raw}[::1], {_RESTORE_ARRAYS}" for raw in ("uint16", "uint32")
)


@register_jitable
def _widen(raw: Any, count: int, kind: int, bits: Any) -> None:
    """Write the float32 bit patterns of the first raw values."""
    if kind == BFLOAT16:
        for i in range(count):
            bits[i] = uint32(raw[i]) << uint32(16)
    elif kind == FLOAT16:
        values = bits.view(np.float32)
        for i in range(count):
            half = uint32(raw[i])
            bits[i] = (half & uint32(0x7FFF)) << uint32(13)
        for i in range(count):
            values[i] = values[i] * _FLOAT16_UP
        for i in range(count):
            half = uint32(raw[i])
            special = uint32(0x7F800000) if (half & uint32(0x7C00)) == uint32(0x7C00) else uint32(0)
            bits[i] = bits[i] | special | ((half & uint32(0x8000)) << uint32(16))
    else:
        for i in range(count):
            bits[i] = uint32(raw[i])


@register_jitable
def _narrow(bits: Any, count: int, kind: int) -> None:
    """Round float32 bit patterns (finite) to the dtype, in place: the upper 16 bits for
    bfloat16, the lower ones for float16.
    """
    if kind == BFLOAT16:
        for i in range(count):
            bits[i] = (bits[i] + uint32(0x7FFF) + ((bits[i] >> uint32(16)) & uint32(1))) & uint32(
                0xFFFF0000
            )
    elif kind == FLOAT16:
        values = bits.view(np.float32)
        for i in range(count):
            value = bits[i]
            sign = value & uint32(0x80000000)
            size = value & uint32(0x7FFFFFFF)
            # below 2^-14 steps are 2^-24 apart: adding 0.5 leaves the rounded count of them in the
            # last bits
            rounded = size + uint32(0xFFF) + ((size >> uint32(13)) & uint32(1))
            usual = min((rounded - uint32(112 << 23)) >> uint32(13), uint32(0x7C00))
            bits[i] = size
            small = values[i] + float32(0.5)
            values[i] = small
            half = usual if size >= uint32(113 << 23) else bits[i] - uint32(126 << 23)
            bits[i] = half | (sign >> uint32(16))


@register_jitable
def _largest_bits(bits: Any, count: int) -> Any:
    """Return the bit pattern of the largest absolute value; one that is not finite is larger
    than any.
    """
    largest = uint32(0)
    for i in range(count):
        largest = max(largest, bits[i] & uint32(0x7FFFFFFF))
    return largest


@register_jitable
def _count_errors(
    raw: Any, count: int, kind: int, restored: Any, original: Any, scale: Any, errors: Any
) -> None:
    """Add up how far `restored` (float32 bits, narrowed here) is from the raw row (widened in
    `original`), in parts of `scale / UNIT`.
    """
    _narrow(restored, count, kind)
    if kind == FLOAT16:
        for i in range(count):
            original[i] = restored[i]
        _widen(original, count, kind, restored)
        _widen(raw, count, kind, original)
    ours, theirs = restored.view(np.float32), original.view(np.float32)
    unit = float32(UNIT) / scale
    largest, squares, power = int32(0), int64(0), int64(0)
    for i in range(count):
        error = int32((abs(theirs[i] - ours[i]) * unit + _TO_WHOLE) - _TO_WHOLE)
        value = int32((abs(theirs[i]) * unit + _TO_WHOLE) - _TO_WHOLE)
        largest = max(largest, error)
        squares += int64(error) * int64(error)
        power += int64(value) * int64(value)
    errors[0] = max(errors[0], int64(largest))
    errors[1] += squares
    errors[2] += power


def quantise_by_token(
    raw: Any,
    shape: tuple[int, int, int, int],
    quantised: Any,
    scales: Any,
    errors: Any,
    scratch: Any,
) -> int:
    """q = rint(((x * C) / m) + C) - C, with m the largest absolute value of the token's row and C =
    levels.

    Source: the documented CacheGen quantiser; restored as ((q / C) * m), rounded to the dtype.

    Args:
        raw: `[tokens * channels]`.
        shape: Rows (tokens), values of a row (channels), dtype, C.
        quantised: int16 `[tokens * channels]`, written: -C … C.
        scales: uint32 `[tokens]`, written: float32 bits of m, which is a value of the dtype.
        errors: int64 `[3]`: the largest error is raised, the sums of squared errors and of squared
            values are added to.
        scratch: uint32 `[2 * channels]`.

    Returns:
        `NOT_FINITE` when a row has a value that is not finite, or a scale that cannot be divided
        by; else `OK`.
    """
    tokens, channels, kind, levels = shape
    bits, restored = scratch[:channels], scratch[channels : 2 * channels]
    values, targets = bits.view(np.float32), restored.view(np.float32)
    maximum = scales.view(np.float32)
    steps = float32(levels)
    for token in range(tokens):
        row = raw[token * channels : (token + 1) * channels]
        whole_row = quantised[token * channels : (token + 1) * channels]
        _widen(row, channels, kind, bits)
        largest = _largest_bits(bits, channels)
        scales[token] = largest
        if largest == uint32(0):
            for i in range(channels):
                whole_row[i] = int16(0)
            continue
        if largest < uint32(_SMALLEST_BITS) or largest > uint32(_LARGEST_BITS):
            return NOT_FINITE
        scale = maximum[token]
        for i in range(channels):
            whole = (values[i] * steps) / scale + steps
            whole = (whole + _TO_WHOLE) - _TO_WHOLE
            whole_row[i] = int16(int32(whole) - int32(levels))
            targets[i] = ((whole - steps) / steps) * scale
        _count_errors(row, channels, kind, restored, bits, scale, errors)
    return OK


def quantise_by_plane(
    raw: Any,
    shape: tuple[int, int, int, int],
    quantised: Any,
    scales: Any,
    errors: Any,
    scratch: Any,
) -> int:
    """q = rint(x / s), with one step s for the whole plane: `fineness / 256` of the standard
    deviation within its channels.

    One step for all channels puts the same error on each: what reverse water-filling asks for.
    Restored as q * s.

    Args:
        raw: `[tokens * channels]`.
        shape: Rows (tokens, at most 32,768), values of a row (channels), dtype, and the step in
            1/256 of the standard deviation, 1 … 1024.
        quantised: int16 `[tokens * channels]`, written; of each channel the values span at most
            254.
        scales: uint32 `[1]`, written: float32 bits of s, 0 where every value is 0.
        errors: See `quantise_by_token`; relative to the plane's largest absolute value.
        scratch: uint32 `[2 * channels]`.

    Returns:
        See `quantise_by_token`; also `NOT_FINITE` where a restored float16 might be infinite.
    """
    tokens, channels, kind, fineness = shape
    bits, restored = scratch[:channels], scratch[channels : 2 * channels]
    values, targets = bits.view(np.float32), restored.view(np.float32)
    scales[0] = _largest_raw(raw, kind, bits)
    largest = scales[0]
    if largest == uint32(0):
        quantised[: tokens * channels] = int16(0)
        return OK
    if largest < uint32(_SMALLEST_BITS) or largest > uint32(
        _LARGEST_HALF_BITS if kind == FLOAT16 else _LARGEST_BITS
    ):
        return NOT_FINITE
    maximum = scales.view(np.float32)[0]
    variance, spread = _spread(raw, (tokens, channels, kind), maximum, bits)
    step_units = _root((variance // int64(channels)) * int64(fineness) * int64(fineness)) >> int64(
        8
    )
    step_units = max(
        max(step_units, int64(1)), (spread + int64(MAX_SPREAD - 1)) // int64(MAX_SPREAD)
    )
    scales.view(np.float32)[0] = float32(step_units) * (maximum / float32(UNIT))
    step = scales.view(np.float32)[0]
    for token in range(tokens):
        row = raw[token * channels : (token + 1) * channels]
        whole_row = quantised[token * channels : (token + 1) * channels]
        _widen(row, channels, kind, bits)
        for i in range(channels):
            whole = (values[i] / step + _TO_WHOLE) - _TO_WHOLE
            whole_row[i] = int16(int32(whole))
            targets[i] = whole * step
        _count_errors(row, channels, kind, restored, bits, maximum, errors)
    return OK


@register_jitable
def _largest_raw(raw: Any, kind: int, bits: Any) -> Any:
    """Return `_largest_bits` of raw values: without their sign, patterns are in the order of
    their values.
    """
    mask = uint32(0x7FFFFFFF) if kind == FLOAT32 else uint32(0x7FFF)
    largest = uint32(0)
    for i in range(raw.size):
        largest = max(largest, uint32(raw[i]) & mask)
    one = np.empty(1, np.uint32)
    one[0] = largest
    _widen(one, 1, kind, bits)
    return bits[0]


@register_jitable
def _spread(raw: Any, shape: Any, maximum: Any, bits: Any) -> Any:
    """Return the sum of the variances of all channels, each rounded down, in 1/UNIT of the maximum,
    squared; and the widest span of a channel.
    """
    tokens, channels, kind = shape
    values = bits.view(np.float32)
    unit = float32(UNIT) / maximum
    variance, spread = int64(0), int64(0)
    totals, lows, highs = (
        np.empty(_BLOCK, np.int32),
        np.empty(_BLOCK, np.int32),
        np.empty(_BLOCK, np.int32),
    )
    squares = np.empty(_BLOCK, np.float64)
    for block in range(0, channels, _BLOCK):
        width = min(_BLOCK, channels - block)
        totals[:], lows[:], highs[:], squares[:] = int32(0), int32(UNIT), int32(-UNIT), 0.0
        for token in range(tokens):
            _widen(
                raw[token * channels + block : token * channels + block + width], width, kind, bits
            )
            for i in range(width):
                values[i] = (values[i] * unit + _TO_WHOLE) - _TO_WHOLE
            for i in range(width):
                squares[i] += np.float64(values[i]) * np.float64(values[i])
            for i in range(width):
                whole = int32(values[i])
                totals[i] += whole
                lows[i] = min(lows[i], whole)
                highs[i] = max(highs[i], whole)
        for i in range(width):
            total = int64(totals[i])
            variance += (int64(tokens) * int64(squares[i]) - total * total) // (
                int64(tokens) * int64(tokens)
            )
            spread = max(spread, int64(highs[i]) - int64(lows[i]))
    return variance, spread


@register_jitable
def _root(square: Any) -> Any:
    """Return the whole part of the square root of a number below 2^52."""
    root = int64(np.sqrt(np.float64(square)))
    while root * root > square:
        root -= 1
    while (root + 1) * (root + 1) <= square:
        root += 1
    return root


def restore(
    symbols: Any,
    raw: Any,
    shape: tuple[int, int, int, int, int],
    scales: Any,
    columns: Any,
    scratch: Any,
) -> None:
    """Write the raw values of a plane from their symbols (see `symbols.choose`).

    Args:
        symbols: uint8 `[tokens * channels]`, each at most `2 * levels`.
        raw: `[tokens * channels]`, written.
        shape: Rows (tokens), values of a row (channels), dtype, levels, and 1 by token, 0 by plane.
        scales: uint32 `[tokens]` by token, else `[1]`.
        columns: int32 `[3, channels]`: shift of each column; all bits where its symbols are deltas,
            none elsewhere; scratch.
        scratch: uint32 `[channels]`.
    """
    tokens, channels, kind, top, by_token = shape
    shift, mask, before = columns[0], columns[1], columns[2]
    values = scratch.view(np.float32)
    scale_of = scales.view(np.float32)
    steps, levels, size = float32(top), int32(top), int32(2 * top + 1)
    scale = scale_of[0]
    for i in range(channels):
        before[i] = int32(0)
    for token in range(tokens):
        row = symbols[token * channels : (token + 1) * channels]
        for i in range(channels):
            centred = int32(row[i]) - levels + (before[i] & mask[i])
            centred = centred - size if centred > levels else centred
            before[i] = centred + size if centred < -levels else centred
        if by_token:
            scale = scale_of[token]
            for i in range(channels):
                whole = before[i] + shift[i]
                whole = whole - size if whole > levels else whole
                whole = whole + size if whole < -levels else whole
                values[i] = (float32(whole) / steps) * scale
        else:
            for i in range(channels):
                values[i] = float32(before[i] + shift[i]) * scale
        _narrow(scratch, channels, kind)
        restored, unused = (
            raw[token * channels : (token + 1) * channels],
            uint32(16 if kind == BFLOAT16 else 0),
        )
        for i in range(channels):
            restored[i] = scratch[i] >> unused
