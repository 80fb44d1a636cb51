"""`cachegen_decode`: decodes streams of words to floating-point KV. The maths: `README.md`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_kernels.cachegen_decode.reference import cachegen_decode_reference, random_planes
from lmcache_kernels.checks import FLOATS, check_tensor
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables
from lmcache_kernels.errors import KernelInputError

__all__ = ["cachegen_decode", "cachegen_decode_reference", "random_planes"]


def cachegen_decode(
    encoded: EncodedPlanes,
    scales: torch.Tensor,
    levels: Sequence[int],
    shape: CodecShape,
    tables: CodecTables,
    out: torch.Tensor,
    by_token: bool,
) -> torch.Tensor:
    """Decode every section and write the values of its symbols. Does not wait for the device.

    Any content of `encoded` is safe: no address outside the tensors is read or written.

    Args:
        encoded: Streams on the tables' device.
        scales: int32 `[planes, tokens]` by token, else `[planes, 1]`: float32 bits.
        levels: Levels of each plane.
        shape: Shape of the KV.
        tables: The tables that it was encoded with.
        out: Filled: bfloat16, float16 or float32 `shape.sizes`, contiguous, on the tables' device.
        by_token: Whether each token has a scale of its own, and symbols are divided by levels.

    Returns:
        uint8 `[planes * sections]`: 0 if a section's stream is a valid encoding; else 1, and its
            values are meaningless.

    Raises:
        KernelInputError: The arguments do not match, or there are no tables for some levels;
            nothing was written.
    """
    device = tables.device
    if out.dtype not in FLOATS or len(levels) != shape.planes or not len(encoded.words):
        raise KernelInputError(
            f"{len(encoded.words)} words of {len(levels)} planes for {shape.planes} planes of"
            f" {out.dtype}"
        )
    check_tensor("out", out, FLOATS, shape.sizes, device)
    check_tensor("shifts", encoded.shifts, (torch.int16,), (shape.planes, shape.groups), device)
    check_tensor("shapes", encoded.shapes, (torch.uint8,), (shape.planes, shape.groups), device)
    check_tensor(
        "lengths", encoded.lengths, (torch.int32,), (shape.planes * shape.sections,), device
    )
    check_tensor("words", encoded.words, (torch.int16,), (len(encoded.words),), device)
    check_tensor(
        "scales", scales, (torch.int32,), (shape.planes, shape.tokens if by_token else 1), device
    )
    from lmcache_kernels.cachegen_decode.kernel import launch

    return launch(encoded, scales, tables.of_planes(levels), shape, tables, out, by_token)
