"""Compile every kernel for GPUs that need not be here: the interpreter accepts programs that the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lmcache_kernels.paged_addressing import WORD_TYPES
from lmcache_kernels.paged_gather.kernel import paged_gather_kernel
from lmcache_kernels.paged_scatter.kernel import paged_scatter_kernel

target = GPUTarget("cuda", int(sys.argv[1]), 32)
arguments = {"table_ptr": "*i64", "slots_ptr": "*i64", "blob_ptr": "*u8"}
for kernel in (paged_gather_kernel, paged_scatter_kernel):
    for word in WORD_TYPES.values():
        for num_tokens in ({"num_tokens": 1}, {}):
            for run_words in (250, 50):
                fixed = {"ROW_WORDS": 250, "RUN_WORDS": run_words, "BLOCK_SIZE": 3, "WORD": word, "ALIGNMENT_BYTES": 16} | num_tokens
                signature = arguments | {"num_tokens": "i32"} | dict.fromkeys(fixed, "constexpr")
                assert "cubin" in compile(ASTSource(kernel, signature, fixed), target=target).asm
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(capability)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
