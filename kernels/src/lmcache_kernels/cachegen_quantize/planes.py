"""The result of `cachegen_quantize`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class QuantizedPlanes:
    """Integers and their scales. All on the input's device, owned by the caller.

    Attributes:
        values: int16 `[planes, tokens, channels]`.
        scales: int32 `[planes, tokens]` by token, `[planes, 1]` by plane: float32 bits of each
            row's or plane's scale.
        errors: int64 `[planes, 3]`: the largest error, the sum of squared errors, the sum of
            squared values, in 1/32767 of a scale.
        status: int32 `[planes]`: 0; 1 if a value is not finite or a scale is not between 2^-100 and
            2^100 (float16 by plane: 2^15): then nothing of the plane is meaningful.
    """

    values: torch.Tensor
    scales: torch.Tensor
    errors: torch.Tensor
    status: torch.Tensor
