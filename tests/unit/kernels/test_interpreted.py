"""Run the kernel checks in a process of their own: Triton decides when it is imported whether it
interprets or compiles.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))
COMPILED = pytest.param(
    False,
    id="compiled",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("interpret", [pytest.param(True, id="interpreted"), COMPILED])
def test_kernels(interpret):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    options = ["-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
    command = [sys.executable, "-m", "pytest", *options, "--timeout", "600", *CHECKS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
