"""Compile every kernel for GPUs that need not be here: the interpreter accepts programs that the
compiler refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize("program", ["compiled.py", "compiled_codec.py"])
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile(capability, program, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    command = [sys.executable, str(Path(__file__).with_name(program)), str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
