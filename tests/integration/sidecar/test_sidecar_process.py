"""A real sidecar process, real engine processes, and SIGKILL."""

from __future__ import annotations

import json
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
from lmcache_core.record import Staged
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_demo.processes import Process
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT, until
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class RunningSidecar:
    process: Process
    socket: Path
    port: int

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """GET, or POST where there is a body."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=5) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def evict(self) -> int:
        """Push everything out of the arena that is not held; how many chunks are left there."""
        self.ask("/v1/admin/evict", {"num_bytes": 1 << 30})
        left: int = self.ask("/v1/tiers")["tiers"]["memory"]["num_chunks"]
        return left


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, quiet_environment(PYTHONPATH=str(ROOT))) as owner:
        yield owner


def start(
    processes: Processes, tmp_path: Path, name: str = "sidecar", **options: Any
) -> RunningSidecar:
    settings = {
        "port": 0,
        "lm_port": 0,
        "instance_id": name,
        "socket_path": tmp_path / "s.sock",
        "arena_path": tmp_path / "arena",
        "arena_gb": 0.01,
    }
    process, ports = processes.start_service(name, "lmcache_sidecar", settings | options)
    return RunningSidecar(process, tmp_path / "s.sock", ports["port"])


def begin_drain(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The hook of a pod that is to end."""
    command = [sys.executable, "-m", "lmcache_sidecar.begin_drain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def test_the_hook_begins_the_drain_and_ends_nothing(processes: Processes, tmp_path: Path) -> None:
    sidecar = start(processes, tmp_path)
    tokens = tokens_of(2 * CHUNK_SIZE)
    with engine_at(sidecar.socket, **PATIENT) as engine:
        engine.store(tokens[:CHUNK_SIZE], kvcaches=random_kv(CHUNK_SIZE))
        assert sidecar.process.process.pid != 1, (
            "nor is it in a pod whose containers share their process ids"
        )
        done = begin_drain(sidecar.socket)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        until(lambda: sidecar.ask("/v1/status")["drain"]["state"] == "done")
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
        assert engine.lookup(tokens) == CHUNK_SIZE, "it serves reads and keeps nothing new"
        sidecar.process.process.send_signal(signal.SIGUSR1)
        assert sidecar.ask("/healthz") == {"status": "ok"}
    sidecar.process.process.send_signal(signal.SIGTERM)
    assert sidecar.process.process.wait(15) == 0
    assert not sidecar.socket.exists()
    left = {path.suffix for path in (tmp_path / "arena").iterdir()}
    assert left == {".arena", ".journal", ".generation"}, "for the next start"
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
    with engine_at(first.socket, **PATIENT) as engine:
        engine.store(tokens, kvcaches=kv)
        until(lambda: first.ask("/v1/status")["settled"])
    first.process.kill()
    second = start(processes, tmp_path, "second", **disk)
    with engine_at(second.socket, **PATIENT) as engine:
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
        assert sidecar.ask("/v1/clients")["clients"][0]["reserved_bytes"] == 2_000_896, (
            "as the arena cuts it"
        )
    finally:
        doomed.kill()
        doomed.wait()
        assert doomed.stdout is not None
        doomed.stdout.close()
    until(lambda: not sidecar.ask("/v1/clients")["clients"])
    figures = sidecar.ask("/v1/tiers")["tiers"]["memory"]
    assert figures["arena_used_bytes"] == 0
    assert figures["num_chunks"] == 0, "a half-written chunk was never visible"


def settled(store: SidecarChunkStore, ticket: str, *chains: Any) -> Staged:
    found: list[Staged] = []

    def is_ready() -> bool:
        staged = store.stage(ticket, chains)
        assert staged is not None
        found.append(staged)
        return staged.is_ready

    until(is_ready, "the lift does not end")
    return found[-1]
