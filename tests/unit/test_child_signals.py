"""Processes that tests start can be interrupted, whatever started the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
IGNORING = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
RUN_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"


def printed_by(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_child_inherits_an_ignored_sigint() -> None:
    """Without the restored signal, an interrupted child keeps running."""
    assert printed_by(IGNORING + RUN_CHILD) == "False"


def test_children_of_the_tests_have_the_default_sigint() -> None:
    assert printed_by(IGNORING + "import tests.conftest; " + RUN_CHILD) == "True"
