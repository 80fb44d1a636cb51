"""The part of `python -m tests.gpu` about SGLang, as far as a CPU can run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gpu.report import read_lines
from tests.gpu.sglang import DRY_SIZES
from tests.vllm.processes import ROOT

COMMAND = [sys.executable, "-m", "tests.gpu", "--dry-run", "--parts", "sglang", "--out"]


def test_a_dry_run_passes(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line["name"]: line for line in read_lines(tmp_path / "gpu.jsonl")}
    assert lines["pages"]["loaded"] == DRY_SIZES.num_pages
    assert all(ms > 0 for ms in lines["ours"]["ms"].values())
    assert all(lines[f"round {number}"]["are_tokens_equal"] for number in (0, 1))
