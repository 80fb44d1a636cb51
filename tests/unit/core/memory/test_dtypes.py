from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lmcache_core.memory import DTYPE_ITEMSIZE, dtype_name, num_bytes


@pytest.mark.parametrize("name", DTYPE_ITEMSIZE)
def test_names_and_sizes_are_torchs(name):
    dtype = getattr(torch, name)
    assert dtype_name(dtype) == dtype_name(name) == dtype_name(f"torch.{name}") == name
    assert DTYPE_ITEMSIZE[name] == dtype.itemsize
    assert num_bytes((2, 3, 4), dtype) == torch.empty(2, 3, 4, dtype=dtype).nbytes


@pytest.mark.parametrize(
    "wrong", ["float", "Float32", "", "torch.", "float32 ", None, 4, torch.complex64, float]
)
def test_what_is_no_dtype_of_ours_is_refused(wrong):
    with pytest.raises(ValueError, match="not supported"):
        dtype_name(wrong)


def test_sizes_do_not_wrap():
    assert num_bytes((2, 128, 1 << 20, 1 << 14), "bfloat16") == 2 * 128 * (1 << 34) * 2
    assert num_bytes((), "float32") == 4
    assert num_bytes((5, 0), "float32") == 0


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        DTYPE_ITEMSIZE["float4"] = 1  # type: ignore[index]


def test_the_package_does_without_torch_until_a_tensor_is_asked_for():
    program = """
import sys
sys.modules["torch"] = None
from lmcache_core.memory import ArenaAllocator, BufferAllocator, dtype_name
obj = ArenaAllocator.anonymous(4096).allocate((2, 3), "bfloat16")
obj.byte_array[:] = bytes(12)
assert BufferAllocator().allocate((4,), "float16").get_size() == 8
try:
    obj.tensor
except ImportError:
    sys.exit(0)
sys.exit("a tensor without torch")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
