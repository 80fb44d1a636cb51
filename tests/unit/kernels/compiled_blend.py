"""Compiles the kernels of blending for a GPU that need not be here. Run by `test_compiled.py`,
as a process of its own.
"""

from __future__ import annotations

import re
import sys

import lmcache_kernels.blend_select.kernel as select_kernels
import lmcache_kernels.rope_rotate.kernel as rotate_kernels
import torch
from lmcache_kernels.rope_rotate import Rotation
from without_gpu import check_compiled, compile_instead_of_launching

KERNELS_OF_TOKENS = {"rope_rotate_kernel", "deviation_kernel"}


def launch_all(dtype: torch.dtype) -> None:
    """Every launch for one dtype; Triton compiles anew where a number is 1, or divisible by 16."""
    for num_heads, head_size, num_rotated, is_interleaved in (
        (4, 64, 64, False),
        (4, 80, 20, True),
        (1, 192, 192, False),
    ):
        k, table, positions = (
            torch.zeros(3, num_heads, head_size, dtype=dtype),
            torch.zeros(5, num_rotated),
            torch.zeros(3, dtype=torch.int64),
        )
        rotate_kernels.launch(k, Rotation(positions, positions, table, table, is_interleaved), k)
    for channels in (1, 100):
        rows = torch.zeros(4, channels, dtype=dtype)
        select_kernels.launch_deviation(
            rows, rows, torch.zeros(4, dtype=torch.bool), torch.zeros(4)
        )


def check(name: str, kernel) -> None:
    """See `check_compiled`; and that no offset is computed in 32 bits.

    Raises:
        AssertionError: Something is not so.
    """
    check_compiled(name, kernel)
    if name in KERNELS_OF_TOKENS:
        program = kernel.asm["ttir"]
        token = re.search(r"(%\w+) = tt.get_program_id x", program)[1]
        uses = [
            line
            for line in program.splitlines()
            if re.search(rf"{token}\b", line) and "get_program_id" not in line
        ]
        assert uses, name
        assert all("arith.extsi" in use for use in uses), (
            f"{name} multiplies a token's number in 32 bits: {uses}"
        )


def main() -> None:
    made = compile_instead_of_launching(int(sys.argv[1]), (rotate_kernels, select_kernels))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        launch_all(dtype)
    for num_tokens, num_tail_tokens in ((4000, 1), (4, 0), (100, 2)):
        mask = torch.zeros(num_tokens, dtype=torch.bool)
        select_kernels.launch_select(
            torch.zeros(num_tokens), mask, [0, num_tokens], [3], num_tail_tokens, mask
        )
    assert {name for name, _ in made} == {*KERNELS_OF_TOKENS, "select_kernel"}
    for name, kernel in made:
        check(name, kernel)


if __name__ == "__main__":
    main()
