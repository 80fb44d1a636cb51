"""The demo as a user runs it: the whole system, real processes, a real model, SIGKILL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_demo.demo import Engine
from lmcache_demo.processes import DemoError, Processes
from lmcache_demo.settings import quiet_environment

from tests.fixtures.redis_server import redis_executable
from tests.fixtures.waiting import wait_until

TIMEOUT_S = 300
COMMAND = [sys.executable, "-m", "lmcache_demo.demo"]


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


def rows_of(output: str) -> list[list[str]]:
    """The cells of what is printed about each engine."""
    return [
        re.split(r"\s{2,}", line.strip())
        for line in output.splitlines()
        if re.match(r" [A-F], ", line)
    ]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A shorter one than pytest's: the paths of Unix sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="demo-") as directory:
        yield Path(directory)


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_every_step_is_as_documented(tmp_path: Path) -> None:
    """With Redis, as found on PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(redis_executable())
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "COLUMNS": "80",
    }
    done = subprocess.run(
        [*COMMAND, "--logs", str(tmp_path / "logs")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "index in: Redis" in done.stdout
    rows = rows_of(done.stdout)
    steps, compressed = rows[:8], rows[8:]
    assert [row[0][0] for row in steps] == ["A", "A", "B", "C", "D", "E", "F", "F"], done.stdout
    places = [
        "computed",
        "own sidecar",
        "sidecar A",
        "cache_storage",
        "computed",
        "cache_storage",
        "D's disk",
        "computed",
    ]
    assert [row[3] for row in steps] == places
    page = (Path(__file__).resolve().parents[3] / "docs/demo.md").read_text(encoding="utf-8")
    assert [(row[0], row[3]) for row in rows_of(page)] == [(row[0], row[3]) for row in steps]
    [head] = [line for line in done.stdout.splitlines() if "engine, step" in line]
    assert head.split() in [line.split() for line in page.splitlines()]
    assert all(int(row[1]) >= 2000 for row in steps)
    assert [int(row[2]) > 0 for row in steps] == [place != "computed" for place in places]
    assert [row[-1] for row in steps if row[0] != "E, cachegen"] == ["yes"] * 7
    assert [row[0] for row in compressed] == ["E, cachegen", "F, lossless"]
    assert [
        float(row[3].removesuffix("x")) > least
        for row, least in zip(compressed, (4, 1), strict=True)
    ] == [True, True]
    assert compressed[1][5:] == ["0", "0", "all equal"]
    assert steps[5][-1] == ("yes" if compressed[0][-1] == "all equal" else "no")
    assert re.fullmatch(r"all equal|differ at token \d+", compressed[0][-1])
    assert ("that of E, cachegen" in " ".join(done.stdout.split())) == (steps[5][-1] == "no")
    check_blended(done.stdout)
    assert not descendants_of(str(tmp_path))


def check_blended(output: str) -> None:
    """Documents as they are fail their certificate, so that prompts are computed in full;
    blended ones pass, and are reused.
    """
    assert "…" not in output
    ways = [
        re.split(r"\s{2,}", line.strip())
        for line in output.splitlines()
        if re.match(r" deviation ", line)
    ]
    assert len(ways) == 2, output
    (blended, as_is), others = ways, [way[5:] for way in ways]
    assert [as_is[1], as_is[4], as_is[6]] == ["0%", "failed", "0"]
    assert [blended[1], blended[4]] == ["25%", "passed"]
    assert float(as_is[2]) > 0.05 > float(blended[2]) >= 0
    # The documents, not the questions of two tokens: more would have been found as a prefix, and
    # not been blended.
    assert int(blended[6]) == int(blended[5]) - 24 * 2 > 1000
    for way in others:
        num_equal, num_answers = map(int, way[2].split(" of "))
        assert num_answers == 24
        assert num_equal >= 22
        assert int(way[3]) >= 22
    assert "failed its certificate for blending (deviation, 0 % recomputed" in " ".join(
        output.split()
    )


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "80"}
    demo = subprocess.Popen(
        [*COMMAND, "--logs", str(tmp_path / "logs"), "--no-redis"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        ports = tmp_path / "logs" / "cache_storage.ports"
        wait_until(lambda: ports.exists() or demo.poll() is not None)
        assert demo.poll() is None
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


def test_an_engine_that_has_ended_is_a_fault_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Processes(tmp_path, quiet_environment()) as processes:
        engine = Engine(processes, "engine-x", "no such worker")
        ended = pytest.raises(DemoError, match=r"(?s)^engine-x has ended:\n.*no such worker")
        with engine.process.process, ended:
            engine.ask("One. Two.")
