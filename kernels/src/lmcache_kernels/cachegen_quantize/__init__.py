"""`cachegen_quantize`: quantises floating-point KV to small integers. The maths: `README.md`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_kernels.cachegen_quantize.planes import QuantizedPlanes
from lmcache_kernels.cachegen_quantize.reference import (
    cachegen_quantize_by_plane_reference,
    cachegen_quantize_by_token_reference,
)
from lmcache_kernels.checks import FLOATS
from lmcache_kernels.codec_shape import MAX_CHANNELS, MAX_LEVELS, MAX_TOKENS
from lmcache_kernels.errors import KernelInputError

__all__ = [
    "QuantizedPlanes",
    "cachegen_quantize_by_plane",
    "cachegen_quantize_by_plane_reference",
    "cachegen_quantize_by_token",
    "cachegen_quantize_by_token_reference",
]

MAX_FINENESS = 1024


def cachegen_quantize_by_token(x: torch.Tensor, levels: Sequence[int]) -> QuantizedPlanes:
    """Divide each row by its largest magnitude into `2 * levels + 1` values. Does not wait for the
    device.

    Args:
        x: bfloat16, float16 or float32 `[planes, tokens, channels]`, contiguous, on a CUDA device.
        levels: Levels of each plane, 1 … 127.

    Raises:
        KernelInputError: `x` or `levels` are out of range.
    """
    _check(x)
    if len(levels) != x.shape[0] or not all(0 < own <= MAX_LEVELS for own in levels):
        raise KernelInputError(
            f"levels are {list(levels)}; expected {x.shape[0]} numbers in 1 … {MAX_LEVELS}, one per"
            " plane"
        )
    from lmcache_kernels.cachegen_quantize.kernel import launch_by_token

    outputs = _outputs(x, x.shape[1])
    launch_by_token(
        x,
        torch.tensor(levels, dtype=torch.uint8).to(x.device),
        (outputs.values, outputs.scales, outputs.errors, outputs.status),
    )
    return outputs


def cachegen_quantize_by_plane(x: torch.Tensor, fineness: int) -> QuantizedPlanes:
    """Divide each plane by one step, `fineness / 256` of the standard deviation within its
    channels. Does not wait for the device.

    Args:
        x: bfloat16, float16 or float32 `[planes, tokens, channels]`, contiguous, on a CUDA device.
        fineness: 1 … 1,024.

    Raises:
        KernelInputError: `x` or `fineness` are out of range.
    """
    _check(x)
    if not 0 < fineness <= MAX_FINENESS:
        raise KernelInputError(
            f"a step of {fineness}/256 of the standard deviation; it must be 1 … {MAX_FINENESS}"
        )
    from lmcache_kernels.cachegen_quantize.kernel import launch_by_plane

    outputs = _outputs(x, 1)
    launch_by_plane(x, fineness, (outputs.values, outputs.scales, outputs.errors, outputs.status))
    return outputs


def _check(x: torch.Tensor) -> None:
    if x.dtype not in FLOATS or x.ndim != 3 or not x.is_contiguous():
        kind = "contiguous" if x.is_contiguous() else "not contiguous"
        raise KernelInputError(
            f"KV is {x.dtype} {tuple(x.shape)}, {kind}; expected [planes, tokens, channels] of a"
            " floating-point dtype"
        )
    if x.numel() == 0 or x.shape[1] > MAX_TOKENS or x.shape[2] > MAX_CHANNELS:
        raise KernelInputError(
            f"KV of {tuple(x.shape)} cannot be quantised: at most {MAX_TOKENS} tokens of"
            f" {MAX_CHANNELS} channels"
        )


def _outputs(x: torch.Tensor, scales_of_plane: int) -> QuantizedPlanes:
    planes = x.shape[0]
    return QuantizedPlanes(
        torch.empty(x.shape, dtype=torch.int16, device=x.device),
        torch.empty((planes, scales_of_plane), dtype=torch.int32, device=x.device),
        torch.zeros((planes, 3), dtype=torch.int64, device=x.device),
        torch.zeros(planes, dtype=torch.int32, device=x.device),
    )
