"""Lets kernels compile for a GPU that need not be here. For the programs that `test_compiled.py`
runs, each as a process of its own.

Triton is told that there is a GPU; a launch ends where the compiled kernel would be sent there.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

NOT_EXACT = re.compile(r"\b(fma|mad)\.\S*f32|\.ftz|div\.(approx|full)|sqrt\.approx")


def compile_instead_of_launching(capability: int, modules: tuple[ModuleType, ...]) -> list:
    """Let kernels compile for that GPU; the list fills with their names and what they became.

    Args:
        capability: Of the GPU, such as 90.
        modules: That launch them, within `launching` of a device.
    """
    target = GPUTarget("cuda", capability, 32)
    there = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
    )
    driver.set_active(there)
    run, made = JITFunction.run, []

    def compile_only(kernel, *args, grid, warmup, **options):
        made.append((kernel.fn.__name__, run(kernel, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    for module in modules:
        assert hasattr(module, "launching"), module
        module.launching = lambda _device: nullcontext()
    return made


def check_compiled(name: str, kernel) -> None:
    """That the GPU's assembler took it, and that sums are rounded as the reference's.

    Raises:
        AssertionError: Something is not so.
    """
    assert "cubin" in kernel.asm, name
    found = NOT_EXACT.search(kernel.asm["ptx"])
    assert not found, f"{name} computes with {found[0]}"
