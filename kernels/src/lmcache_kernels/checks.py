"""The check that the wrappers of blending's ops share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_kernels.errors import KernelInputError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
) -> None:
    """Check a tensor that an op is given; None stands for any size.

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
