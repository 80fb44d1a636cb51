"""Conversion of floating-point words in Triton kernels, sizes for them, and launching."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from lmcache_kernels.errors import KernelInputError

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options of every kernel that computes with floating-point numbers: each operation is
rounded separately, as in the reference.
"""


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current for launches: a CUDA device, or any device if Triton interprets.

    Raises:
        KernelInputError: Kernels cannot run on the device.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    if isinstance(widen, triton.JITFunction):
        raise KernelInputError(
            f"tensors are on {device}; this op has a kernel for CUDA devices only"
        )
    return nullcontext()


def unspecialized(*sizes: int) -> tuple[int, ...]:
    """Return sizes for an argument of a kernel that is a tuple: odd numbers above 1, of which the
    kernel takes `size_of`. For sizes that are 1 or multiples of 16 Triton would compile again,
    while a request waits, and `do_not_specialize` does not reach into tuples.
    """
    return tuple(2 * size + 3 for size in sizes)


@triton.jit
def size_of(number):  # type: ignore[no-untyped-def]
    """Return one of the sizes that were given to `unspecialized`."""
    return (number >> 1) - 1


@triton.jit  # type: ignore[untyped-decorator]
def widen(raw, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return words of a dtype (`checks.KINDS`) as float32 values, exactly."""
    if KIND == 0:
        values = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        values = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = raw.to(tl.float32, bitcast=True)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def narrow(values, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 values to the words of a dtype (`checks.KINDS`): to nearest, ties to even."""
    if KIND == 0:
        bits = values.to(tl.uint32, bitcast=True)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        # Rounding by bits would turn the NaN that GPUs compute, whose bits are all ones except the
        # sign, into -0.
        raw = tl.where(values != values, 0x7FC0, raw).to(tl.int16)
    elif KIND == 1:
        raw = values.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        raw = values.to(tl.int32, bitcast=True)
    return raw
