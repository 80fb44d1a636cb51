"""Compiles the kernels of blending for a GPU that need not be here. Run by `test_compiled.py`, as a process of its own."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import lmcache_kernels.blend_select.kernel as select_kernels
import lmcache_kernels.rope_rotate.kernel as rotate_kernels
import torch
from lmcache_kernels.rope_rotate import Rotation
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


def compile_instead_of_launching(capability: int) -> list:
    """Let kernels compile for that GPU; the list fills with their names and what they became."""
    target = GPUTarget("cuda", capability, 32)
    there = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _device: 0)
    driver.set_active(there)
    run, made = JITFunction.run, []

    def compile_only(kernel, *args, grid, warmup, **options):
        made.append((kernel.fn.__name__, run(kernel, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    for module in (rotate_kernels, select_kernels):
        module.launching = lambda _device: nullcontext()
    return made


def main() -> None:
    made = compile_instead_of_launching(int(sys.argv[1]))
    positions = torch.zeros(3, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_size, num_rotated in ((64, 64), (80, 20)):
            k, table = torch.zeros(3, 4, head_size, dtype=dtype), torch.zeros(5, num_rotated)
            for is_interleaved in (False, True):
                rotate_kernels.launch(k, Rotation(positions, positions, table, table, is_interleaved), k)
        rows = torch.zeros(4, 100, dtype=dtype)
        select_kernels.launch_deviation(rows, rows, torch.zeros(4, dtype=torch.bool), torch.zeros(4))
    mask = torch.zeros(4000, dtype=torch.bool)
    select_kernels.launch_select(torch.zeros(4000), mask, [0, 4000], [3], 1, mask)
    assert {name for name, _ in made} == {"rope_rotate_kernel", "deviation_kernel", "select_kernel"}
    assert all("cubin" in kernel.asm for _, kernel in made)


if __name__ == "__main__":
    main()
