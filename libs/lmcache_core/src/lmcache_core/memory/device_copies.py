"""Copies between host memory and a device, beside those of a serving engine."""

from __future__ import annotations

import torch

from lmcache_core.memory.tensor import copy_parts

PIECE_BYTES = 4 << 20
"""Copies are launched in pieces of this size. The serving engine's own copies, which are small,
wait for the pieces that have begun, 0.1 ms each, and not for whole chunks.
"""


def launch_copy(target: torch.Tensor, source: torch.Tensor, *, host: torch.Tensor) -> None:
    """Launch a copy between a device and host memory on the current stream.

    Args:
        target: uint8, flat, as `source`.
        host: Which of them is in host memory.
    """
    for part in copy_parts(host):
        pieces = (torch.split(side[part], PIECE_BYTES) for side in (target, source))
        for to, of in zip(*pieces, strict=True):
            to.copy_(of, non_blocking=True)
