"""Compile the decoder as its launches ask for it, without a GPU, and check what comes out.
Run by `test_compiled.py`.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import torch
from compiled import check, compile_instead_of_launching
from lmcache_core.serde.device import decodes_rightly
from lmcache_kernels.cachegen_decode import cachegen_decode
from lmcache_kernels.cachegen_decode import kernel as decode_kernels
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables
from triton.backends.compiler import GPUTarget

NUM_LEVELS = 15
ALPHABET = SimpleNamespace(levels=NUM_LEVELS, frequencies=np.full((4, 31), 132))
ALPHABET.frequencies[:, 0] += 4
SHAPES = (
    CodecShape(2, 256, 1024, 1, 128),
    CodecShape(2, 1, 100, 64, 100),
    CodecShape(1, 33, 1, 2, 1),
)


def launch(dtype: torch.dtype, shape: CodecShape, by_token: bool) -> None:
    """The launch for one tensor."""
    groups, num_streams = (shape.planes, shape.groups), shape.planes * shape.sections
    encoded = EncodedPlanes(
        torch.zeros(groups, dtype=torch.int16),
        torch.zeros(groups, dtype=torch.uint8),
        torch.full((num_streams,), 64, dtype=torch.int32),
        torch.zeros(64 * num_streams, dtype=torch.int16),
    )
    scales = torch.zeros(shape.planes, shape.tokens if by_token else 1, dtype=torch.int32)
    tables = CodecTables.of([ALPHABET], torch.device("cpu"))
    levels, out = [NUM_LEVELS] * shape.planes, torch.zeros(shape.sizes, dtype=dtype)
    cachegen_decode(encoded, scales, levels, shape, tables, out, by_token)


def check_trial(made: list) -> None:
    """What is tried before serving is the program that serving runs."""
    for shape in SHAPES:
        made.clear()
        for by_token in (True, False):
            launch(torch.bfloat16, shape, by_token)
        decodes_rightly(torch.device("cpu"), torch.bfloat16, shape.tokens, shape.channels)
        assert len(made) == 4
        assert len({id(kernel) for _, kernel in made}) == 2, f"for values of {shape}"


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    made = compile_instead_of_launching(target, decode_kernels)
    for by_token in (True, False):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            launch(dtype, SHAPES[0], by_token)
        for shape in SHAPES[1:]:
            launch(torch.bfloat16, shape, by_token)
    check_trial(made)
    assert {name for name, _ in made} == {"decode_kernel"}
    for name, kernel in made:
        check(name, kernel)
        assert kernel.metadata.num_warps == 1


if __name__ == "__main__":
    main()
