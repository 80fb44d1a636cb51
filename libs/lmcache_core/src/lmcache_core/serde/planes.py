"""Splits elements into one byte that varies little and bytes that look random, and joins them
again. Compiled by `machine_code`.

The sign of a floating-point element first moves to the low end, so that for bfloat16 and float32
the first byte is the exponent.
"""

from __future__ import annotations

from typing import Any

from numba import int64, uint8, uint64

SPLIT_SIGNATURE = (
    "void(Array(uint8, 1, 'C', readonly=True), UniTuple(int64, 2), uint8[::1], uint8[::1])"
)
JOIN_SIGNATURE = (
    "void(uint8[::1], Array(uint8, 1, 'C', readonly=True), UniTuple(int64, 2), uint8[::1])"
)
COUNT_SIGNATURE = "void(uint8[::1], int64[:, ::1])"


def split(raw: Any, shape: tuple[int, int], first: Any, rest: Any) -> None:
    """Split elements.

    Args:
        raw: uint8 `[elements * itemsize]`, little-endian elements.
        shape: Bytes of an element (itemsize), and 1 to rotate each element left by one bit first.
        first: uint8 `[elements]`, written: the upper byte of each.
        rest: uint8 `[elements * (itemsize - 1)]`, written: the others.
    """
    itemsize, rotated = shape
    if itemsize == 1:
        for i in range(first.size):
            first[i] = raw[i]
    elif itemsize == 2 and rotated:
        for i in range(first.size):
            low, high = raw[2 * i], raw[2 * i + 1]
            first[i] = uint8((high << uint8(1)) | (low >> uint8(7)))
            rest[i] = uint8((low << uint8(1)) | (high >> uint8(7)))
    else:
        top = 8 * (itemsize - 1)
        for i in range(first.size):
            value = uint64(0)
            for byte in range(itemsize):
                value |= uint64(raw[i * itemsize + byte]) << uint64(8 * byte)
            if rotated:
                value = (value << uint64(1)) | (value >> uint64(8 * itemsize - 1))
            first[i] = uint8(value >> uint64(top))
            for byte in range(itemsize - 1):
                rest[i * (itemsize - 1) + byte] = uint8(value >> uint64(8 * byte))


def join(first: Any, rest: Any, shape: tuple[int, int], raw: Any) -> None:
    """Join elements that `split` has split."""
    itemsize, rotated = shape
    if itemsize == 1:
        for i in range(first.size):
            raw[i] = first[i]
    elif itemsize == 2 and rotated:
        for i in range(first.size):
            high, low = first[i], rest[i]
            raw[2 * i] = uint8((high << uint8(7)) | (low >> uint8(1)))
            raw[2 * i + 1] = uint8((low << uint8(7)) | (high >> uint8(1)))
    else:
        top = 8 * (itemsize - 1)
        for i in range(first.size):
            value = uint64(first[i]) << uint64(top)
            for byte in range(itemsize - 1):
                value |= uint64(rest[i * (itemsize - 1) + byte]) << uint64(8 * byte)
            if rotated:
                value = (value >> uint64(1)) | ((value & uint64(1)) << uint64(8 * itemsize - 1))
            for byte in range(itemsize):
                raw[i * itemsize + byte] = uint8(value >> uint64(8 * byte))


def count(symbols: Any, counts: Any) -> None:
    """Count symbols, using the rows of `counts` in turn, so that runs of one symbol do not wait for
    one another.

    Args:
        symbols: uint8.
        counts: int64 `[4, 256]`, incremented.
    """
    whole = symbols.size - symbols.size % 4
    for i in range(0, whole, 4):
        counts[0, symbols[i]] += int64(1)
        counts[1, symbols[i + 1]] += int64(1)
        counts[2, symbols[i + 2]] += int64(1)
        counts[3, symbols[i + 3]] += int64(1)
    for i in range(whole, symbols.size):
        counts[0, symbols[i]] += int64(1)
