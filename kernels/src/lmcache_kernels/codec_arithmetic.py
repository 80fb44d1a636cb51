"""Arithmetic that the codec's Triton kernels share. Launch with `enable_fp_fusion=False`: every
operation is to be rounded by itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from lmcache_kernels.errors import KernelInputError

_TO_WHOLE = tl.constexpr(12582912.0)
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options of every kernel that computes with floating-point numbers."""


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one for launches: a CUDA device, or any where Triton interprets.

    Raises:
        KernelInputError: No kernel runs there.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    if isinstance(widen, triton.JITFunction):
        raise KernelInputError(
            f"tensors are on {device}; this op has a kernel for CUDA devices only"
        )
    return nullcontext()


@triton.jit  # type: ignore[untyped-decorator]
def widen(raw, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of the words of a dtype (`codec_shape.KINDS`), exactly."""
    if KIND == 0:
        values = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        values = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = raw.to(tl.float32, bitcast=True)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def narrow(values, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of a dtype of finite float32 values, rounded to nearest, ties to even."""
    if KIND == 0:
        bits = values.to(tl.uint32, bitcast=True)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif KIND == 1:
        raw = values.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        raw = values.to(tl.int32, bitcast=True)
    return raw


@triton.jit
def magnitude_bits(values):  # type: ignore[no-untyped-def]
    """int32 bit patterns of absolute values: they are ordered as the values are, and those of
    what is not finite are the largest.
    """
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rounded(values):  # type: ignore[no-untyped-def]
    """Numbers below 2^22 rounded to whole ones, ties to even, by adding and subtracting 1.5 *
    2^23.
    """
    return (values + _TO_WHOLE) - _TO_WHOLE


@triton.jit
def fold(values, levels):  # type: ignore[no-untyped-def]
    """Whole numbers, at most `2 * levels + 1` out of range, modulo that, in `-levels … levels`."""
    values = tl.where(values > levels, values - (2 * levels + 1), values)
    return tl.where(values < -levels, values + (2 * levels + 1), values)


@triton.jit
def whole_root(square):  # type: ignore[no-untyped-def]
    """The whole part of the square root of an int64 below 2^52."""
    root = tl.sqrt(square.to(tl.float64)).to(tl.int64)
    root -= (root * root > square).to(tl.int64)
    root += ((root + 1) * (root + 1) <= square).to(tl.int64)
    return root
