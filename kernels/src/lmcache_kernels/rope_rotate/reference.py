"""The torch reference of `rope_rotate`, used on devices without a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lmcache_kernels.rope_rotate import Rotation


def rope_rotate_reference(k: torch.Tensor, rotation: Rotation, out: torch.Tensor) -> None:
    """Compute `rope_rotate`, on any device."""
    cos_from, sin_from = rotation.source_table[rotation.source].chunk(2, 1)
    cos_to, sin_to = rotation.target_table[rotation.target].chunk(2, 1)
    cos = (cos_to * cos_from + sin_to * sin_from)[:, None]
    sin = (sin_to * cos_from - cos_to * sin_from)[:, None]
    num_rotated = rotation.num_rotated
    rotated = k[..., :num_rotated].float()
    if rotation.is_interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(
            -2
        )
    else:
        first, second = rotated.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    out[..., :num_rotated] = turned.to(k.dtype)
    if out.data_ptr() != k.data_ptr():
        out[..., num_rotated:] = k[..., num_rotated:]
