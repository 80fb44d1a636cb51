"""Compile the codec's kernels as their launches ask for them, without a GPU, and check what
comes out. Run by `test_compiled.py`.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import torch
from compiled import check, compile_instead_of_launching
from lmcache_kernels.cachegen_decode import cachegen_decode
from lmcache_kernels.cachegen_decode import kernel as decode_kernels
from lmcache_kernels.cachegen_encode import kernel as encode_kernels
from lmcache_kernels.cachegen_quantize import cachegen_quantize_by_plane, cachegen_quantize_by_token
from lmcache_kernels.cachegen_quantize import kernel as quantize_kernels
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables
from triton.backends.compiler import GPUTarget

NUM_LEVELS = 15
ALPHABET = SimpleNamespace(
    levels=NUM_LEVELS, frequencies=np.full((4, 31), 132), choice=np.zeros((2, 2), np.int64)
)
ALPHABET.frequencies[:, 0] += 4
SHAPES = (
    CodecShape(2, 256, 1024, 1, 128),
    CodecShape(2, 1, 100, 64, 100),
    CodecShape(1, 33, 1, 2, 1),
)
STREAM_KERNELS = {"encode_kernel", "decode_kernel"}


def launch_all(dtype: torch.dtype, shape: CodecShape, by_token: bool) -> None:
    """Every launch of the codec for one tensor."""
    tables = CodecTables.of([ALPHABET], torch.device("cpu"))
    x, levels = torch.zeros(shape.sizes, dtype=dtype), [NUM_LEVELS] * shape.planes
    planes = (
        cachegen_quantize_by_token(x, levels) if by_token else cachegen_quantize_by_plane(x, 144)
    )
    of_planes = tables.of_planes(levels)
    shifts, shapes = encode_kernels.launch_choose(planes.values, of_planes, shape, tables, by_token)
    streams, lengths = encode_kernels.launch_encode(
        planes.values, (of_planes, shifts, shapes), shape, tables
    )
    words = encode_kernels.launch_gather(streams, lengths.fill_(64))
    cachegen_decode(
        EncodedPlanes(shifts, shapes, lengths, words),
        planes.scales,
        levels,
        shape,
        tables,
        x,
        by_token,
    )


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    made = compile_instead_of_launching(target, quantize_kernels, encode_kernels, decode_kernels)
    for by_token in (True, False):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            launch_all(dtype, SHAPES[0], by_token)
        for shape in SHAPES[1:]:
            launch_all(torch.bfloat16, shape, by_token)
    assert len({name for name, _ in made}) == 8
    for name, kernel in made:
        check(name, kernel)
        assert (kernel.metadata.num_warps == 1) == (name in STREAM_KERNELS), name


if __name__ == "__main__":
    main()
