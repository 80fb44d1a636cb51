"""Arithmetic shared by the codec's Triton kernels. Launch with `arithmetic.EXACT`."""

from __future__ import annotations

import triton
import triton.language as tl

_TO_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def magnitude_bits(values):  # type: ignore[no-untyped-def]
    """Return the int32 bit patterns of absolute values, which are in the order of the values,
    non-finite ones last.
    """
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rounded(values):  # type: ignore[no-untyped-def]
    """Round numbers below 2^22, ties to even, by adding and subtracting 1.5 * 2^23."""
    return (values + _TO_WHOLE) - _TO_WHOLE


@triton.jit
def fold(values, levels):  # type: ignore[no-untyped-def]
    """Map integers that exceed the range by at most `2 * levels + 1` into `-levels … levels`,
    modulo that.
    """
    values = tl.where(values > levels, values - (2 * levels + 1), values)
    return tl.where(values < -levels, values + (2 * levels + 1), values)


@triton.jit
def whole_root(square):  # type: ignore[no-untyped-def]
    """Return the integer square root of an int64 below 2^52."""
    root = tl.sqrt(square.to(tl.float64)).to(tl.int64)
    root -= (root * root > square).to(tl.int64)
    root += ((root + 1) * (root + 1) <= square).to(tl.int64)
    return root
