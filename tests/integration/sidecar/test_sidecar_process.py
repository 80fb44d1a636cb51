"""A real sidecar process, real engine processes, and SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lmcache_demo.processes import Process
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import until
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class RunningSidecar:
    process: Process
    socket: Path
    port: int
    health_port: int

    def get(self, path: str, port: int | None = None) -> dict[str, Any]:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port or self.port}{path}", timeout=5
        ) as response:
            body: dict[str, Any] = json.loads(response.read())
            return body


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, quiet_environment(PYTHONPATH=str(ROOT))) as owner:
        yield owner
    assert owner.num_alive == 0


def start(
    processes: Processes, tmp_path: Path, name: str = "sidecar", **options: Any
) -> RunningSidecar:
    settings = {
        "port": 0,
        "lm_port": 0,
        "health_port": 0,
        "instance_id": name,
        "socket_path": tmp_path / "s.sock",
        "arena_path": tmp_path / "arena",
        "arena_gb": 0.01,
    }
    process, ports = processes.start_service(name, "lmcache_sidecar", settings | options)
    return RunningSidecar(process, tmp_path / "s.sock", ports["port"], ports["health_port"])


def test_sigterm_ends_it_cleanly(processes: Processes, tmp_path: Path) -> None:
    sidecar = start(processes, tmp_path)
    sidecar.process.process.send_signal(signal.SIGTERM)
    assert sidecar.process.process.wait(15) == 0
    assert not sidecar.socket.exists()
    assert {path.suffix for path in (tmp_path / "arena").iterdir()} == {
        ".arena",
        ".journal",
        ".generation",
    }, "for the next start"


def begin_drain(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The hook of a pod that is to end."""
    command = [sys.executable, "-m", "lmcache_sidecar.begin_drain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def test_the_hook_begins_the_drain_and_ends_nothing(processes: Processes, tmp_path: Path) -> None:
    sidecar = start(processes, tmp_path)
    tokens = tokens_of(2 * CHUNK_SIZE)
    with engine_at(sidecar.socket) as engine:
        engine.store(tokens[:CHUNK_SIZE], kvcaches=random_kv(CHUNK_SIZE))
        assert sidecar.process.process.pid != 1, (
            "nor is it in a pod whose containers share their process ids"
        )
        done = begin_drain(sidecar.socket)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        until(lambda: sidecar.get("/v1/status")["drain"]["state"] == "done")
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
        assert engine.lookup(tokens) == CHUNK_SIZE, "reads go on, and nothing new is kept"
        sidecar.process.process.send_signal(signal.SIGUSR1)
        assert sidecar.get("/healthz") == {"status": "ok"}
    sidecar.process.process.send_signal(signal.SIGTERM)
    assert sidecar.process.process.wait(15) == 0
    done = begin_drain(sidecar.socket)
    assert done.returncode == 1, "who has gone needs no drain, and the log of the pod says so"
    assert done.stdout.startswith(f"the drain cannot begin: {sidecar.socket}: ")


def test_the_hook_needs_little() -> None:
    code = (
        "import sys, lmcache_sidecar.begin_drain; print(*{name.partition('.')[0] for name in"
        " sys.modules})"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "pydantic", "msgspec", "fastapi", "lmcache_core"} & set(loaded)


def test_a_restarted_sidecar_serves_its_disk(processes: Processes, tmp_path: Path) -> None:
    disk = {"disk_path": tmp_path / "disk", "disk_gb": 0.05}
    tokens, kv, target = (
        tokens_of(4 * CHUNK_SIZE),
        random_kv(4 * CHUNK_SIZE),
        empty_kv(4 * CHUNK_SIZE),
    )
    first = start(processes, tmp_path, "first", **disk)
    with engine_at(first.socket) as engine:
        engine.store(tokens, kvcaches=kv)
        until(lambda: first.get("/v1/status")["settled"])
    first.process.kill()
    second = start(processes, tmp_path, "second", **disk)
    with engine_at(second.socket) as engine:
        assert engine.lookup(tokens, ["LocalDiskBackend"]) == len(tokens)
        assert engine.retrieve(tokens, kvcaches=target).all()
    assert_equal_prefix(target, kv, len(tokens))


STORE_AND_HANG = """
    import sys, time
    from pathlib import Path
    from lmcache_core.sidecar import SidecarConnection
    from lmcache_core.wire import messages as m

    hello = m.engine_hello(m.EngineInfo("doomed", 1, 0, "", ""), [])
    connection = SidecarConnection(Path(sys.argv[1]), hello, 5.0)
    connection.open()
    for extent in connection.call(m.ReserveExtents((500_000,) * 4), m.Extents).items:
        begin = extent.offset
        connection.arena.store_view[begin : begin + 250_000] = b"half" * 62_500
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_engine_leaves_nothing_behind(processes: Processes, tmp_path: Path) -> None:
    sidecar = start(processes, tmp_path)
    doomed = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STORE_AND_HANG), str(sidecar.socket)],
        stdout=subprocess.PIPE,
    )
    try:
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == b"ready\n"
        assert sidecar.get("/v1/clients")["clients"][0]["reserved_bytes"] == 2_000_896, (
            "as the arena cuts it"
        )
    finally:
        doomed.kill()
        doomed.wait()
        assert doomed.stdout is not None
        doomed.stdout.close()
    until(lambda: not sidecar.get("/v1/clients")["clients"])
    figures = sidecar.get("/v1/tiers")["tiers"]["Hot"]
    assert figures["arena_used_bytes"] == 0
    assert figures["num_chunks"] == 0, "a half-written chunk was never visible"


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        ({"arena_gb": 60000}, 3, "lower arena_gb"),
        ({"arena_path": "/proc/nowhere"}, 2, "arena_path='/proc/nowhere'"),
        ({"socket_path": "/proc/nowhere/s.sock"}, 2, "socket_path='/proc/nowhere/s.sock'"),
        ({"tenant": "no such / tenant"}, 2, "tenant"),
    ],
)
def test_a_start_that_cannot_be_says_why_in_one_line(
    processes: Processes, tmp_path: Path, options: dict[str, Any], code: int, complaint: str
) -> None:
    from lmcache_demo.processes import DemoError

    with pytest.raises(DemoError, match=f"ended with code {code}") as caught:
        start(processes, tmp_path, **options)
    assert complaint in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not list(tmp_path.glob("arena/*")), "nothing is left behind"


def test_the_default_directory_is_refused_when_others_may_enter_it(tmp_path: Path) -> None:
    from lmcache_demo.processes import DemoError

    (tmp_path / f"lmcache-{os.getuid()}").mkdir()
    (tmp_path / f"lmcache-{os.getuid()}").chmod(0o755)
    with Processes(tmp_path, quiet_environment(TMPDIR=str(tmp_path))) as owner:
        settings = {
            "port": 0,
            "lm_port": 0,
            "arena_gb": 0.01,
            "instance_id": "x",
            "arena_path": tmp_path / "arena",
        }
        with pytest.raises(DemoError, match="nobody else may enter"):
            owner.start_service("x", "lmcache_sidecar", settings)
        (tmp_path / f"lmcache-{os.getuid()}").rmdir()
        owner.start_service("y", "lmcache_sidecar", settings)
        assert (tmp_path / f"lmcache-{os.getuid()}").stat().st_mode & 0o777 == 0o700
