"""Compile every kernel for GPUs that need not be here: the interpreter accepts programs that the
compiler refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lmcache_kernels.paged_gather.kernel import paged_gather_kernel
from lmcache_kernels.paged_scatter.kernel import paged_scatter_kernel

target = GPUTarget("cuda", int(sys.argv[1]), 32)
arguments = {"table_ptr": "*i64", "slots_ptr": "*i64", "blob_ptr": "*u8"}
for kernel in (paged_gather_kernel, paged_scatter_kernel):
    for alignment_bytes in (1, 2, 4, 8, 16):
        for num_tokens in ({"num_tokens": 1}, {}):
            for run_words in (250, 50):
                fixed = {"ROW_WORDS": 250, "RUN_WORDS": run_words, "ALIGNMENT_BYTES": alignment_bytes} | num_tokens
                signature = arguments | {"num_tokens": "i32"} | dict.fromkeys(fixed, "constexpr")
                done = compile(ASTSource(kernel, signature, fixed), target=target).asm
                assert "cubin" in done
                assert ("ld.global.v2.b64" in done["ptx"]) == (alignment_bytes == 16)
"""  # noqa: E501


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(capability)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["compiled_blend.py", "compiled_codec.py"])
@pytest.mark.parametrize("capability", [80, 90])
def test_other_kernels_compile(capability, program, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    command = [sys.executable, str(Path(__file__).with_name(program)), str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
