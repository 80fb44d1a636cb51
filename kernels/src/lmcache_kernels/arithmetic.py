"""How the Triton kernels of blending read floating-point numbers, and where they run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

from lmcache_kernels.errors import KernelInputError

WORD_DTYPES = MappingProxyType(
    {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
)
KINDS = MappingProxyType({torch.bfloat16: 0, torch.float16: 1, torch.float32: 2})
"""How kernels are told which dtype the words are of."""
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options of every kernel that computes with floating-point numbers: each operation is
rounded by itself, as the reference does it.
"""


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one for launches: a CUDA device, or any if Triton interprets.

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
    """Return the float32 values of the words of a dtype (`KINDS`), exactly."""
    if KIND == 0:
        values = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        values = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = raw.to(tl.float32, bitcast=True)
    return values
