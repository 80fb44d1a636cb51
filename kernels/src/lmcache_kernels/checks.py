"""Argument checks shared by the codec and blending ops, and the dtypes that they accept."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch

from lmcache_kernels.errors import KernelInputError

WORD_DTYPES = MappingProxyType(
    {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
)
KINDS = MappingProxyType({torch.bfloat16: 0, torch.float16: 1, torch.float32: 2})
"""Codes by which kernels receive the dtype of words."""
FLOATS = tuple(KINDS)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
) -> None:
    """Check a tensor argument of an op; None stands for any size.

    Raises:
        KernelInputError: It has another dtype, shape or device, or is not contiguous.
    """
    fits = len(shape) == tensor.ndim and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    is_contiguous = tensor.is_contiguous()
    if not fits or tensor.dtype not in dtypes or tensor.device != device or not is_contiguous:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelInputError(
            f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device},"
            f" {'' if is_contiguous else 'not '}contiguous; must be"
            f" {' or '.join(map(str, dtypes))} [{sizes}] on {device}, contiguous"
        )
