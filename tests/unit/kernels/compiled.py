"""Compile every kernel for a GPU that need not be here, and check the machine code. Run by
`test_compiled.py`, as a process of its own.
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import lmcache_kernels.blend_select.kernel as select_kernels
import lmcache_kernels.paged_copy.kernel as paged_kernels
import lmcache_kernels.rope_rotate.kernel as rotate_kernels
import torch
from lmcache_kernels.paged_copy import CheckedSlots
from lmcache_kernels.paged_copy.kernel import paged_gather_kernel, paged_scatter_kernel
from lmcache_kernels.pages import Pages
from lmcache_kernels.rope_rotate import Rotation
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

NOT_EXACT = re.compile(r"\b(fma|mad)\.\S*f32|\.ftz|div\.(approx|full)|sqrt\.approx")
PARTS = ((0, 32, 0, 32), (16, 272, 0, 256), (7, 9, 7, 256), (0, 1, 0, 1))
"""Slots, begin and end; the chunk's token that belongs to the first, and its tokens."""
KERNELS_OF_TOKENS = {"rope_rotate_kernel", "deviation_kernel"}


def compile_paged(target: GPUTarget) -> None:
    arguments = {"table_ptr": "*i64", "slots_ptr": "*i64", "blob_ptr": "*u8"}
    # Every width, and heads that lie apart.
    cases = [(alignment_bytes, 250) for alignment_bytes in (1, 2, 4, 8, 16)] + [(4, 50)]
    for kernel in (paged_gather_kernel, paged_scatter_kernel):
        for alignment_bytes, run_words in cases:
            fixed = {"ROW_WORDS": 250, "RUN_WORDS": run_words, "ALIGNMENT_BYTES": alignment_bytes}
            constants = dict.fromkeys(fixed, "constexpr")
            signature = arguments | {"sizes": ("i32", "i32")} | constants
            source = ASTSource(kernel, signature, fixed)
            done = triton_compile(source, target=target).asm
            assert "cubin" in done
            assert ("ld.global.v2.b64" in done["ptx"]) == (alignment_bytes == 16)


def compile_instead_of_launching(target: GPUTarget, *modules) -> list:
    """Let launches in these modules compile for that GPU and end there; the list fills with the
    kernels' names and what they became.
    """
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
        )
    )
    run, made = JITFunction.run, []

    def compile_only(kernel, *args, grid, warmup, **options):
        made.append((kernel.fn.__name__, run(kernel, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    for module in modules:
        assert hasattr(module, "launching"), module
        module.launching = lambda _device: nullcontext()
    return made


def check_one_program_for_all_sizes(made: list) -> None:
    """Whatever is copied after the canary, of that layout: chunks, and parts of them from any token
    on.
    """
    for row in (64, 33):  # of 32-bit words
        pages = Pages.of([torch.zeros(40, 16, 1, row, dtype=torch.float32) for _ in range(2)])
        slots = CheckedSlots.of(pages, torch.arange(640), once=True)
        for to_pages in (False, True):
            made.clear()
            for begin, end, first, num_tokens in PARTS:
                blob = torch.zeros(1, 2, num_tokens, row)
                copy = slots.part(begin, end).copy_with(blob, to_pages, first, num_tokens)
                paged_kernels.launch(copy, to_pages)
            assert len({id(kernel) for _, kernel in made}) == 1, f"rows of {row} words"
    made.clear()


def launch_blending() -> None:
    """Every launch; Triton compiles again where a number is 1, or divisible by 16."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_heads, head_size, num_rotated, is_interleaved in (
            (4, 64, 64, False),
            (4, 80, 20, True),
            (1, 192, 192, False),
        ):
            k = torch.zeros(3, num_heads, head_size, dtype=dtype)
            table, positions = torch.zeros(5, num_rotated), torch.zeros(3, dtype=torch.int64)
            rotation = Rotation(positions, positions, table, table, is_interleaved)
            rotate_kernels.launch(k, rotation, k)
        for channels in (1, 100):
            rows, mask = torch.zeros(4, channels, dtype=dtype), torch.zeros(4, dtype=torch.bool)
            select_kernels.launch_deviation(rows, rows, mask, torch.zeros(4))
    for num_tokens, num_tail_tokens in ((4000, 1), (4, 0), (100, 2)):
        mask = torch.zeros(num_tokens, dtype=torch.bool)
        select_kernels.launch_select(
            torch.zeros(num_tokens), mask, [0, num_tokens], [3], num_tail_tokens, mask
        )


def check(name: str, kernel) -> None:
    """That the GPU's assembler took it, that sums are rounded as the reference's, and that no
    offset is computed in 32 bits.
    """
    assert "cubin" in kernel.asm, name
    found = NOT_EXACT.search(kernel.asm["ptx"])
    assert not found, f"{name} computes with {found[0]}"
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
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compile_paged(target)
    made = compile_instead_of_launching(target, rotate_kernels, select_kernels)
    check_one_program_for_all_sizes(made)
    launch_blending()
    assert {name for name, _ in made} == {*KERNELS_OF_TOKENS, "select_kernel"}
    for name, kernel in made:
        check(name, kernel)


if __name__ == "__main__":
    main()
