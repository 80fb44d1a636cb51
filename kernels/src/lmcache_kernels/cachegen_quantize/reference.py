"""The torch reference of `cachegen_quantize`, for tests: whole tensors, one rounded float32
operation after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lmcache_kernels.cachegen_quantize.planes import QuantizedPlanes

UNIT = 32767
MAX_SPREAD = 252


def cachegen_quantize_by_token_reference(x: torch.Tensor, levels: Sequence[int]) -> QuantizedPlanes:
    """Compute `cachegen_quantize_by_token`, on any device."""
    wide = x.float()
    largest = wide.abs().amax(2, keepdim=True)
    is_usable = _is_usable(largest)
    scale = torch.where(is_usable & (largest > 0), largest, 1.0)
    wide = torch.where(is_usable, wide, 0.0)
    steps = torch.tensor(levels, dtype=torch.float32).to(x.device)[:, None, None]
    values = torch.round(wide * steps / scale + steps) - steps
    errors = _errors(wide, (values / steps * scale).to(x.dtype).float(), scale)
    status = (~is_usable).any(1).any(1).int()
    return QuantizedPlanes(
        values.to(torch.int16), largest.squeeze(2).view(torch.int32), errors, status
    )


def cachegen_quantize_by_plane_reference(x: torch.Tensor, fineness: int) -> QuantizedPlanes:
    """Compute `cachegen_quantize_by_plane`, on any device."""
    wide = x.float()
    tokens, channels = x.shape[1:]
    largest = wide.abs().amax((1, 2), keepdim=True)
    is_usable = _is_usable(largest) & ((x.dtype != torch.float16) | (largest <= 2.0**15))
    top = torch.where(is_usable & (largest > 0), largest, 1.0)
    wide = torch.where(is_usable, wide, 0.0)
    whole = torch.round(wide * (torch.tensor(float(UNIT), device=x.device) / top)).long()
    spread = (whole.amax(1) - whole.amin(1)).amax(1)
    variances = (tokens * (whole * whole).sum(1) - whole.sum(1) ** 2) // tokens**2
    steps = []
    for variance, distance in zip(
        (variances.sum(1) // channels).tolist(), spread.tolist(), strict=True
    ):
        steps.append(max(math.isqrt(variance * fineness**2) // 256, 1, -(-distance // MAX_SPREAD)))
    step = torch.tensor(steps, dtype=torch.float32).to(x.device)[:, None, None] * (
        top / float(UNIT)
    )
    values = torch.round(wide / step)
    errors = _errors(wide, (values * step).to(x.dtype).float(), top)
    scales = torch.where(largest == 0, 0.0, step).reshape(-1, 1).view(torch.int32)
    return QuantizedPlanes(values.to(torch.int16), scales, errors, (~is_usable).flatten().int())


def _is_usable(largest: torch.Tensor) -> torch.Tensor:
    return (largest == 0) | ((largest >= 2.0**-100) & (largest <= 2.0**100))


def _errors(wide: torch.Tensor, restored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    unit = torch.tensor(float(UNIT), device=wide.device) / scale
    error = torch.round((wide - restored).abs() * unit).long()
    value = torch.round(wide.abs() * unit).long()
    return torch.stack(
        [error.amax((1, 2)), (error * error).sum((1, 2)), (value * value).sum((1, 2))], 1
    )
