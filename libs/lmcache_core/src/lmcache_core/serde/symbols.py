"""The model of quantised values: what is expected of each channel, and what is left to code.
Compiled by `machine_code.compiled`.

A channel's values are coded relative to its mean (its shift), or, where that is smaller, each
relative to the value of the token before (delta). What is left is a symbol in `-levels … levels`,
modulo `2 * levels + 1`; its variance chooses the table.
"""

from __future__ import annotations

from typing import Any

from numba import int16, int32, int64, uint8
from numba.extending import register_jitable

from lmcache_core.serde.tables import DELTA_FLAG, VARIANCE_UNIT

_DELTA_GAIN_NUMERATOR, _DELTA_GAIN_DENOMINATOR = 15, 16
"""Deltas are coded where their variance is below this part of the variance about the mean."""
NUM_SUMS = 6
_BLOCK = 512
"""Channels that are worked on together: what is known of each stays in the first-level cache."""

CHOOSE_SIGNATURE = (
    "void(int16[::1], UniTuple(int64, 5), int64[:, ::1], int16[::1], uint8[::1], int32[:, ::1],"
    " uint8[::1])"
)


@register_jitable
def _fold(value: Any, levels: Any, size: Any) -> Any:
    """Return a number in `-2 * size < value < 2 * size`, modulo `size`, in `-levels … levels`;
    written without branches.
    """
    value = value - size if value > levels else value
    return value + size if value < -levels else value


@register_jitable
def _round_mean(total: Any, count: Any) -> Any:
    """Return the mean, rounded to a whole number, halves up."""
    return (int64(2) * total + count) // (int64(2) * count)


@register_jitable
def _shape_of(squares: Any, count: Any, largest: Any, choice: Any) -> Any:
    """Return the tight or wide table for symbols with that sum of squares and that largest absolute
    value.
    """
    variance = squares * int64(VARIANCE_UNIT) // count
    width = int64(0)
    for i in range(choice.shape[1]):
        width += int64(variance > choice[0, i])
    return uint8(int64(2) * width + int64(largest > choice[1, width]))


@register_jitable
def _choose_shifts(quantised: Any, shape: Any, shifts: Any, sums: Any) -> None:
    """Write the shift of each group, and in `sums[0]` that of each channel."""
    tokens, channels, per_group, levels, wraps = shape
    low, high, total = sums[0], sums[1], sums[2]
    for i in range(channels):
        low[i], high[i], total[i] = int32(32767), int32(-32768), int32(0)
    for token in range(tokens):
        row = quantised[token * channels : (token + 1) * channels]
        for i in range(channels):
            value = int32(row[i])
            total[i] += value
            low[i] = min(low[i], value)
            high[i] = max(high[i], value)
    for group in range(shifts.size):
        first, last = group * per_group, min(channels, (group + 1) * per_group)
        whole, lowest, highest = int64(0), int32(32767), int32(-32768)
        for i in range(first, last):
            whole += int64(total[i])
            lowest, highest = min(lowest, low[i]), max(highest, high[i])
        shift = int32(_round_mean(whole, int64(tokens) * int64(last - first)))
        if not wraps:
            shift = max(min(shift, lowest + int32(levels)), highest - int32(levels))
        shifts[group] = int16(shift)
        for i in range(first, last):
            low[i] = shift


@register_jitable
def _measure(quantised: Any, shape: Any, sums: Any) -> None:
    """Make values relative to their shift, in place, and add up squares of them (`sums[2]`) and
    of their deltas (`sums[3]`).
    """
    tokens, channels, _, top, _ = shape
    levels, size = int32(top), int32(2 * top + 1)
    for block in range(0, channels, _BLOCK):
        last = min(channels, block + _BLOCK)
        shift, before, squares, deltas = (
            sums[0, block:last],
            sums[1, block:last],
            sums[2, block:last],
            sums[3, block:last],
        )
        for i in range(last - block):
            before[i], squares[i], deltas[i] = int32(0), int32(0), int32(0)
        for token in range(tokens):
            row = quantised[token * channels + block : token * channels + last]
            for i in range(last - block):
                centred = _fold(int32(row[i]) - shift[i], levels, size)
                delta = _fold(centred - before[i], levels, size)
                row[i] = int16(centred)
                before[i] = centred
                squares[i] += centred * centred
                deltas[i] += delta * delta


@register_jitable
def _choose_delta(shape: Any, shapes: Any, sums: Any) -> None:
    """Write `DELTA_FLAG` or nothing for each group, and in `sums[4]` for each channel all bits
    where deltas are coded, none elsewhere.
    """
    _, channels, per_group, _, _ = shape
    for group in range(shapes.size):
        first, last = group * per_group, min(channels, (group + 1) * per_group)
        squares, deltas = int64(0), int64(0)
        for i in range(first, last):
            squares += int64(sums[2, i])
            deltas += int64(sums[3, i])
        is_delta = deltas * int64(_DELTA_GAIN_DENOMINATOR) < squares * int64(_DELTA_GAIN_NUMERATOR)
        shapes[group] = uint8(DELTA_FLAG) if is_delta else uint8(0)
        for i in range(first, last):
            sums[4, i] = int32(-1) if is_delta else int32(0)


@register_jitable
def _write_symbols(centred: Any, shape: Any, sums: Any, symbols: Any) -> None:
    """Write the symbols, and in `sums[5]` the largest of each channel, without its sign."""
    tokens, channels, _, top, _ = shape
    levels, size = int32(top), int32(2 * top + 1)
    for block in range(0, channels, _BLOCK):
        last = min(channels, block + _BLOCK)
        before, mask, largest = sums[1, block:last], sums[4, block:last], sums[5, block:last]
        for i in range(last - block):
            before[i], largest[i] = int32(0), int32(0)
        for token in range(tokens):
            row = centred[token * channels + block : token * channels + last]
            coded = symbols[token * channels + block : token * channels + last]
            for i in range(last - block):
                symbol = _fold(int32(row[i]) - (before[i] & mask[i]), levels, size)
                before[i] = int32(row[i])
                coded[i] = uint8(symbol + levels)
                largest[i] = max(largest[i], abs(symbol))


@register_jitable
def _choose_shapes(shape: Any, choice: Any, shapes: Any, sums: Any) -> None:
    """Add the shape of each group to its flag."""
    tokens, channels, per_group, _, _ = shape
    for group in range(shapes.size):
        first, last = group * per_group, min(channels, (group + 1) * per_group)
        squares, largest = int64(0), int32(0)
        for i in range(first, last):
            squares += int64(sums[3, i] if shapes[group] else sums[2, i])
            largest = max(largest, sums[5, i])
        shapes[group] |= _shape_of(squares, int64(tokens) * int64(last - first), largest, choice)


def choose(
    quantised: Any,
    shape: tuple[int, int, int, int, int],
    choice: Any,
    shifts: Any,
    shapes: Any,
    sums: Any,
    symbols: Any,
) -> None:
    """Choose shift, delta and table of each group of channels, and write the symbols.

    Args:
        quantised: int16 `[tokens * channels]`; overwritten.
        shape: Rows (tokens, at most 32,768), values of a row (channels), channels of a group,
            levels, and 1 where values are modulo `2 * levels + 1`, 0 where those of a group span at
            most that.
        choice: See `ShapeTables.choice`.
        shifts: int16 `[groups]`, written.
        shapes: uint8 `[groups]`, written: number of the table, and `DELTA_FLAG`.
        sums: int32 `[NUM_SUMS, channels]`, scratch.
        symbols: uint8 `[tokens * channels]`, written: symbol plus `levels`.
    """
    _choose_shifts(quantised, shape, shifts, sums)
    _measure(quantised, shape, sums)
    _choose_delta(shape, shapes, sums)
    _write_symbols(quantised, shape, sums, symbols)
    _choose_shapes(shape, choice, shapes, sums)
