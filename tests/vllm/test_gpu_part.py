"""The part of `python -m tests.gpu` about vLLM, as far as a CPU can run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import vllm
from tests.gpu.report import read_lines
from tests.vllm.processes import ROOT, vllm_environment

COMMAND = [sys.executable, "-m", "tests.gpu", "--dry-run", "--parts", "vllm", "--out"]


@pytest.mark.since("0.32")
def test_a_dry_run_passes(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, tmp_path], cwd=ROOT, env=vllm_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(tmp_path / "gpu.jsonl")
    assert [line["name"] for line in lines if "ms" in line] == list(vllm.DRY_KINDS)
    assert all(ms > 0 for line in lines if "ms" in line for ms in line["ms"].values())
    rounds = [line for line in lines if "cached" in line]
    checked = {line["name"].partition(":")[0] for line in rounds if line["checked_bytes"]}
    assert checked == {vllm.OURS}
    (layouts,) = (line for line in lines if line["name"] == "layouts")
    assert "passed" in layouts["text"]
    stored = vllm.DRY_SIZES.num_stored
    for line in rounds:
        has_cache = not line["name"].startswith(vllm.NONE)
        assert line["cached"] == [0, stored, stored if has_cache else 0], line["name"]
