"""Tensors over bytes and bytes under tensors, without a copy. torch is imported on first use."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from lmcache_core.memory.dtypes import dtype_name

if TYPE_CHECKING:
    import torch


def tensor_over(
    view: memoryview, shape: Sequence[int], dtype: torch.dtype | str | None
) -> torch.Tensor:
    """Return a CPU tensor of that shape and dtype that shares `view`'s memory (a read-only view
    must not be written through it).
    """
    import torch

    kind = torch.uint8 if dtype is None else getattr(torch, dtype_name(dtype))
    if len(view) == 0:
        return torch.empty(tuple(shape), dtype=kind)
    if view.readonly:
        _warn_unseen()
    flat: torch.Tensor = torch.frombuffer(view, dtype=kind)
    return flat.view(tuple(shape))


@cache
def _warn_unseen() -> None:
    """Trigger, and suppress, the warning that torch issues once per process for a read-only
    buffer.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        torch.frombuffer(bytes(1), dtype=torch.uint8)


def bytes_under(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, sharing its memory."""
    import torch

    flat: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return flat
