"""Tests of this repository, run by pytest in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(
    config: Path, *arguments: Path | str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process in which a new warning of CUDA is no error."""
    options = ["-p", "no:cacheprovider", "-p", "tests.gpu.wrong_bytes", "-o", "filterwarnings="]
    command = [sys.executable, "-W", "default", "-m", "pytest", "--rootdir", ROOT, "-c", config]
    return subprocess.run(
        [*command, *options, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
