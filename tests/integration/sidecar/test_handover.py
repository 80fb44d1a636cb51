"""A sidecar ends, and what only it had is served by others: real processes, real services, real
signals.
"""

from __future__ import annotations

import base64
import json
import secrets
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL
from lmcache_demo.processes import Process
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import until
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 4
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
TOKEN = "sidecars-0123456789abcdef"
STOP_S = 15.0


@dataclass
class Sidecar:
    process: Process
    socket: Path
    port: int

    def get(self, path: str) -> dict[str, Any]:
        return self._answer(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}"))

    def post(self, path: str) -> dict[str, Any]:
        return self._answer(
            urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method="POST")
        )

    def _answer(self, request: urllib.request.Request) -> dict[str, Any]:
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=10) as response:
            body: dict[str, Any] = json.loads(response.read())
            return body

    def terminate(self) -> None:
        self.process.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = STOP_S) -> int:
        return self.process.process.wait(seconds)


class Site:
    """Where sidecars run: what all of them are given, beside their own settings."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self._processes = processes
        self._directory = directory
        self.options: dict[str, Any] = {}
        (directory / "token").write_text(TOKEN)
        (directory / "tokens.yaml").write_text(
            f"tokens:\n  - {{name: sidecars, tenant: default, role: admin, token: {TOKEN}}}\n"
        )

    def start(self, name: str, module: str, settings: dict[str, Any]) -> dict[str, int]:
        _, ports = self._processes.start_service(name, module, settings)
        return ports

    def sidecar(self, name: str, **options: Any) -> Sidecar:
        settings = {
            "port": 0,
            "lm_port": 0,
            "instance_id": name,
            "socket_path": self._directory / f"{name}.sock",
            "arena_path": self._directory / f"{name}-arena",
            "arena_gb": 0.01,
            "auth_tokens_file": self._directory / "tokens.yaml",
            "service_token_file": self._directory / "token",
        }
        process, ports = self._processes.start_service(
            name, "lmcache_sidecar", settings | self.options | options
        )
        return Sidecar(process, self._directory / f"{name}.sock", ports["port"])

    def with_neighbours(self) -> None:
        """From now on sidecars know lookup and broker."""
        keys = self._directory / "ticket-keys"
        keys.write_text(f"k1:{base64.b64encode(secrets.token_bytes(32)).decode()}\n")
        lookup = self.start("lookup", "lmcache_lookup", {"port": 0})
        broker = self.start("broker", "lmcache_broker", {"port": 0, "ticket_keys_file": keys})
        self.options["lookup_url"] = f"http://127.0.0.1:{lookup['port']}"
        self.options["broker_url"] = f"http://127.0.0.1:{broker['port']}"
        self.options["ticket_keys_file"] = keys

    def storage(self, lm_port: int) -> None:
        """Storage with that lm:// port."""
        self.start(
            "storage",
            "lmcache_storage",
            {"port": 0, "lm_port": lm_port, "memory_gb": 0.01, "instance_id": "storage-0"},
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Processes(tmp_path, quiet_environment()) as processes:
        yield Site(processes, tmp_path)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def store_at(sidecar: Sidecar, seed: int = 1) -> None:
    with engine_at(sidecar.socket) as engine:
        engine.store(tokens_of(NUM_TOKENS, seed), kvcaches=random_kv(NUM_TOKENS, seed))
    until(lambda: sidecar.get("/v1/status")["pending_bytes"] == 0)


def assert_hit(sidecar: Sidecar, tier: str, seed: int = 1) -> None:
    target = empty_kv(NUM_TOKENS)
    with engine_at(sidecar.socket) as engine:
        until(lambda: engine.lookup(tokens_of(NUM_TOKENS, seed), [tier]) == NUM_TOKENS)
        assert engine.retrieve(tokens_of(NUM_TOKENS, seed), kvcaches=target).all()
        assert engine.counters.value(RETRIEVED_TOKENS_TOTAL, tier) == NUM_TOKENS
    assert_equal_prefix(target, random_kv(NUM_TOKENS, seed), NUM_TOKENS)


def test_what_storage_missed_while_it_was_away_it_has_when_the_sidecar_is_gone(site: Site) -> None:
    lm_port = free_port()
    site.options["remote_url"] = f"lm://127.0.0.1:{lm_port}"
    first = site.sidecar("first")
    store_at(first)
    assert first.get("/v1/tiers")["tiers"]["storage"]["unkept_writes"] == NUM_CHUNKS
    site.storage(lm_port)
    first.terminate()
    assert first.wait() == 0
    assert f"drained: chunks={NUM_CHUNKS} handed_over={NUM_CHUNKS}" in first.process.tail()
    assert_hit(site.sidecar("fresh"), "storage")


def test_a_peer_takes_over_and_serves_itself_and_others(site: Site) -> None:
    site.with_neighbours()
    leaving, heir, third = (site.sidecar(name) for name in ("leaving", "heir", "third"))
    for sidecar in (leaving, heir, third):
        until(lambda sidecar=sidecar: sidecar.get("/v1/status")["registered"])
    store_at(leaving)
    until(lambda: leaving.get("/v1/status")["settled"])
    leaving.terminate()
    assert leaving.wait() == 0
    assert f"handed_over={NUM_CHUNKS}" in leaving.process.tail()
    held = [sidecar.get("/v1/tiers")["tiers"]["memory"]["num_chunks"] for sidecar in (heir, third)]
    assert sum(held) == NUM_CHUNKS
    taker, other = (heir, third) if held[0] else (third, heir)
    until(lambda: taker.get("/v1/status")["settled"])
    assert_hit(other, "peers")
    assert_hit(taker, "memory")


class HangingServer:
    """Accepts connections and says nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepted: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self._accepted.append(self._listener.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for connection in (self._listener, *self._accepted):
            connection.close()


@pytest.fixture
def hanging() -> Iterator[HangingServer]:
    server = HangingServer()
    yield server
    server.close()


def hanging_sidecar(site: Site, hanging: HangingServer, drain_timeout_s: float) -> Sidecar:
    sidecar = site.sidecar(
        "stuck",
        remote_url=f"lm://127.0.0.1:{hanging.port}",
        drain_timeout_s=drain_timeout_s,
        tier_timeout_s=60,
    )
    with engine_at(sidecar.socket) as engine:
        engine.store(tokens_of(NUM_TOKENS), kvcaches=random_kv(NUM_TOKENS))
        assert engine.lookup(tokens_of(NUM_TOKENS), ["Hot"]) == NUM_TOKENS
    return sidecar


def test_a_target_that_hangs_does_not_keep_it_beyond_its_time(
    site: Site, hanging: HangingServer
) -> None:
    sidecar = hanging_sidecar(site, hanging, 2.0)
    begin = time.monotonic()
    sidecar.terminate()
    until(lambda: sidecar.get("/v1/status")["drain"]["state"] == "handing_over")
    assert sidecar.get("/v1/status")["drain"]["left"] == NUM_CHUNKS, (
        "it tells how far it is while it ends"
    )
    assert sidecar.wait() == 0
    assert 1.5 < time.monotonic() - begin < 30.0
    assert f"refused=0 left={NUM_CHUNKS}" in sidecar.process.tail()
    assert not sidecar.socket.exists()


def test_a_second_sigterm_ends_it_at_once(site: Site, hanging: HangingServer) -> None:
    sidecar = hanging_sidecar(site, hanging, 60.0)
    sidecar.terminate()
    until(lambda: sidecar.get("/v1/status")["draining"])
    assert sidecar.process.is_alive
    sidecar.terminate()
    assert sidecar.wait() == 128 + signal.SIGTERM
