"""docs/tutorial.md, run as it is written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "--- end of block ---"
TIMEOUT_S = 110


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_the_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    commands: list[str] = []
    expected: list[str] = []
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "sh":
            commands.append(text)
            expected.append("")
        else:
            expected[-1] = text
    assert any(expected)
    script = "".join(f"{block}\necho '{MARK}'\n" for block in commands)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    environ = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONWARNINGS": "default",
    }
    (tmp_path / "script").write_text(script)
    with (tmp_path / "output").open("wb") as output, (tmp_path / "errors").open("wb") as errors:
        shell = subprocess.Popen(
            ["bash", "-eu", "script"],  # as if typed, but stopping at the first failure
            stdin=subprocess.DEVNULL,
            stdout=output,  # no pipe: services that outlive the shell would hold it open
            stderr=errors,
            cwd=tmp_path,
            env=environ,
            start_new_session=True,
        )
        try:
            status = shell.wait(TIMEOUT_S)
        finally:
            with_children(shell.pid)
            shell.wait(10)
    answered, errors = (
        (tmp_path / name).read_text(errors="replace") for name in ("output", "errors")
    )
    assert status == 0, f"{answered}\n{errors}"
    printed = [part.strip() for part in answered.split(f"{MARK}\n")][: len(expected)]
    assert printed == [text.strip() for text in expected], errors


def with_children(group: int) -> None:
    """End what the shell has begun, if it was stopped in the middle."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
