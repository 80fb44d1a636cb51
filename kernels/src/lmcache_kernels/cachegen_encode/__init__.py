"""`cachegen_encode`: encodes small integers to streams of words. The maths: `README.md`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_kernels.cachegen_encode.reference import cachegen_encode_reference
from lmcache_kernels.checks import check_tensor
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables
from lmcache_kernels.errors import KernelInputError

__all__ = ["cachegen_encode", "cachegen_encode_reference"]


def cachegen_encode(
    values: torch.Tensor, shape: CodecShape, levels: Sequence[int], tables: CodecTables, wraps: bool
) -> EncodedPlanes:
    """Choose shift, delta and table of each group of channels, and encode every section. Waits for
    the device.

    Args:
        values: int16 `shape.sizes`, contiguous, on a CUDA device. If `wraps`, in `-levels …
            levels`; else the values of a group span at most `2 * levels`.
        shape: Shape of the values.
        levels: Levels of each plane.
        tables: Tables on the same device.
        wraps: Whether values are modulo `2 * levels + 1`: true for quantisation by token, false by
            plane.

    Raises:
        KernelInputError: The arguments do not match, or there are no tables for some levels.
    """
    check_tensor("values", values, (torch.int16,), shape.sizes, tables.device)
    if len(levels) != shape.planes:
        raise KernelInputError(f"levels of {len(levels)} planes; expected {shape.planes}")
    from lmcache_kernels.cachegen_encode.kernel import launch_choose, launch_encode, launch_gather

    planes = tables.of_planes(levels)
    shifts, shapes = launch_choose(values, planes, shape, tables, wraps)
    streams, lengths = launch_encode(values, (planes, shifts, shapes), shape, tables)
    return EncodedPlanes(shifts, shapes, lengths, launch_gather(streams, lengths))
