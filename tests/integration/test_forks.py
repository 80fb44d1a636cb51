"""An engine that is open during a fork: the child works without it, the parent keeps it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_closing import PATIENCE_S, storage_server

ENDS = ("os._exit", "sys.exit", "multiprocessing", "unused")


def run_parent(end: str, directory: str, remote_url: str) -> None:
    parent = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.forking_parent", end, directory, remote_url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert parent.returncode == 0, parent.stderr
    assert parent.stderr == ""


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("end", ENDS)
def test_a_forked_child_misses_at_once_and_harms_nothing(end: str, tmp_path: Path) -> None:
    with storage_server() as (_, url):
        run_parent(end, str(tmp_path), url)


@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_forked_child_does_without_memory_too() -> None:
    run_parent("sys.exit", "-", "-")
