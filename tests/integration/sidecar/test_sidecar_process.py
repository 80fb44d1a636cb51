"""The hook of a pod that is to end, on a real sidecar process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT
from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.neighbourhood import start_sidecar
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at
from tests.fixtures.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, quiet_environment(PYTHONPATH=str(ROOT))) as owner:
        yield owner


def begin_drain(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The hook of a pod that is to end."""
    command = [sys.executable, "-m", "lmcache_sidecar.begin_drain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_hook_begins_the_drain_and_ends_no_process(
    processes: Processes, tmp_path: Path
) -> None:
    sidecar = start_sidecar(processes, tmp_path)
    tokens = tokens_of(2 * CHUNK_SIZE)
    with engine_at(sidecar.socket, **PATIENT) as engine:
        engine.store(tokens[:CHUNK_SIZE], kvcaches=random_kv(CHUNK_SIZE))
        done = begin_drain(sidecar.socket)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        wait_until(lambda: sidecar.get("/v1/status")["drain"]["state"] == "done")
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
        assert engine.lookup(tokens) == CHUNK_SIZE, "it serves reads and keeps nothing new"
        sidecar.process.process.send_signal(signal.SIGUSR1)
        assert sidecar.get("/healthz") == {"status": "ok"}
    sidecar.process.process.send_signal(signal.SIGTERM)
    assert sidecar.process.process.wait(60) == 0
    assert not sidecar.socket.exists()
    left = {path.suffix for path in (tmp_path / "sidecar-arena").iterdir()}
    assert left == {".arena", ".journal", ".generation"}, "for the next start"
    done = begin_drain(sidecar.socket)
    assert done.returncode == 1, "the log of the pod names the reason"
    assert done.stdout.startswith(f"the drain cannot begin: {sidecar.socket}: ")


def test_the_hook_imports_little() -> None:
    code = (
        "import sys, lmcache_sidecar.begin_drain; print(*{name.partition('.')[0] for name in"
        " sys.modules})"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "pydantic", "msgspec", "fastapi", "lmcache_core"} & set(loaded)
