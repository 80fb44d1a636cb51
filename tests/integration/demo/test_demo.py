"""The demo as a user runs it: the whole system, real processes, a real model, SIGKILL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures.redis_server import redis_executable

TIMEOUT_S = 300
COMMAND = [sys.executable, "-m", "lmcache_demo.cli"]


def descendants_of(marker: str) -> list[str]:
    """Command lines of living processes that mention the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line and str(os.getpid()) != path.parent.name:
            found.append(line)
    return found


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_every_step_is_as_said(tmp_path: Path) -> None:
    """With Redis, as found on PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(redis_executable())
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "COLUMNS": "80"}
    done = subprocess.run(
        [*COMMAND, "--logs", str(tmp_path / "logs")], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "index in: Redis" in done.stdout
    rows = {
        m[1]: (int(m[2]), int(m[3]), m[4].strip(), m[5])
        for m in re.finditer(r"^ ([A-D], [^0-9]+?\d?)\s{2,}(\d+)\s+(\d+)\s+(\S+(?: \S+)?)\s.*(yes|NO)\s*$", done.stdout, re.MULTILINE)
    }
    assert [name[0] for name in rows] == ["A", "A", "B", "C", "D"], done.stdout
    places = [place for _, _, place, _ in rows.values()]
    assert places == ["computed", "own sidecar", "sidecar A", "cache_storage", "computed"]
    assert all(prompt >= 2000 for prompt, _, _, _ in rows.values())
    assert [reused > 0 for _, reused, _, _ in rows.values()] == [False, True, True, True, False]
    assert all(equal == "yes" for _, _, _, equal in rows.values())
    assert not descendants_of(str(tmp_path))


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "80"}
    demo = subprocess.Popen([*COMMAND, "--logs", str(tmp_path / "logs"), "--no-redis"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "logs" / "cache_storage.ports").exists():
            assert time.monotonic() < deadline
            assert demo.poll() is None
            time.sleep(0.05)
        assert descendants_of(str(tmp_path))
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130
    assert "interrupted" in output
    assert not descendants_of(str(tmp_path))
    assert not list(tmp_path.glob("lmcache-demo-*"))
