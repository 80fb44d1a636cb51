"""Indices and masks, as the documented helpers name them."""

from __future__ import annotations

import torch


def create_index(
    ndims: int, target_dim: int, index: torch.Tensor | slice
) -> tuple[torch.Tensor | slice, ...]:
    """Return an index of `ndims` dimensions that takes everything but for one.

    Args:
        ndims: Dimensions of the tensor to be indexed.
        target_dim: The one; negative counts from the last.
        index: What to take of it.

    Raises:
        ValueError: There is no such dimension.
    """
    if not -ndims <= target_dim < ndims:
        raise ValueError(f"dimension {target_dim} of a tensor of {ndims}")
    whole: list[torch.Tensor | slice] = [slice(None)] * ndims
    whole[target_dim] = index
    return tuple(whole)


def indices_to_mask(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Return booleans `[size]` on the device of the indices, True at these.

    Raises:
        ValueError: An index is negative or not below `size`.
    """
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise ValueError(
            f"indices reach from {int(indices.min())} to {int(indices.max())}; the mask has {size}"
        )
    mask = torch.zeros(size, dtype=torch.bool, device=indices.device)
    mask[indices] = True
    return mask


def mask_to_indices(mask: torch.Tensor) -> torch.Tensor:
    """Return int64 indices, in order, of what is not zero in a one-dimensional mask, on its
    device.
    """
    return mask.nonzero().flatten()
