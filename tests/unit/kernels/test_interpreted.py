"""Run the kernel checks in a process of their own: Triton decides when it is imported whether it
interprets or compiles.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


SIDE_BY_SIDE = 2
"""Interpreting is slow and takes one core: so many checks run at once."""


def run(check: Path, interpret: bool) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | (
        {"TRITON_INTERPRET": "1"} if interpret else {}
    )
    options = [
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
        "--timeout",
        "600",
    ]
    command = [sys.executable, "-m", "pytest", *options, str(check)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def interpreted(request):
    """The runs of the checks that were selected, all under way."""
    selected = [
        item.callspec.params
        for item in request.session.items
        if getattr(item, "function", None) is test_kernels
    ]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {
            params["check"]: pool.submit(run, params["check"], True)
            for params in selected
            if params["interpret"]
        }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("interpret", [pytest.param(True, id="interpreted"), COMPILED])
@pytest.mark.parametrize("check", CHECKS, ids=lambda path: path.stem)
def test_kernels(check, interpret, interpreted):
    done = interpreted[check].result() if interpret else run(check, False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
