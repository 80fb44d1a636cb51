"""A model is scaled under load: a pod comes, and another one ends by its hook and SIGTERM."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.engine import LMCacheEngine
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, get_json
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at
from tests.fixtures.waiting import wait_until

NUM_TOKENS = 4 * CHUNK_SIZE
TOKEN = "sidecars-0123456789abcdef"
STOP_S = 60.0
MIN_ROUNDS = 5


def check_found(engine: LMCacheEngine, seed: int, num_tokens: int = NUM_TOKENS) -> None:
    """Find and load tokens; their KV must be what was stored."""
    tokens, target = tokens_of(num_tokens, seed), empty_kv(num_tokens)
    assert engine.lookup(tokens) == num_tokens, seed
    assert engine.retrieve(tokens, kvcaches=target).all(), seed
    assert_equal_prefix(target, random_kv(num_tokens, seed), num_tokens)


def check_found_at(sidecar: Sidecar, seed: int) -> None:
    with engine_at(sidecar.socket, **PATIENT) as engine:
        check_found(engine, seed)


class Load:
    """An engine that finds and loads what it has stored, again and again, and stores more.

    Attributes:
        stores: Whether it stores more; a sidecar that drains keeps nothing new.
        failure: What went wrong.
    """

    def __init__(self, sidecar: Sidecar, seed: int) -> None:
        self._sidecar = sidecar
        self._seed = seed
        self._ends = threading.Event()
        self._num_rounds = 0
        self.stores = True
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self) -> None:
        """Wait for a few more rounds."""
        enough = self._num_rounds + MIN_ROUNDS
        wait_until(lambda: self._num_rounds >= enough or self.failure is not None)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(STOP_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with engine_at(self._sidecar.socket, **PATIENT) as engine:
                self._store(engine, self._seed, NUM_TOKENS)
                while not self._ends.is_set():
                    check_found(engine, self._seed)
                    if self.stores:
                        more = self._seed + 100 + self._num_rounds
                        self._store(engine, more, CHUNK_SIZE)
                        check_found(engine, more, CHUNK_SIZE)
                    self._num_rounds += 1
        except BaseException as exc:
            self.failure = exc

    def _store(self, engine: LMCacheEngine, seed: int, num_tokens: int) -> None:
        engine.store(tokens_of(num_tokens, seed), kvcaches=random_kv(num_tokens, seed))


class Deployment:
    """Pods of a model, whose sidecars may hand over to one another."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self._services = Neighbourhood(processes, directory, default_lease_ttl_ms=6000)
        self._tokens, self._token = directory / "tokens.yaml", directory / "token"
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        entry = f"{{name: sidecar, tenant: default, role: admin, token_sha256: {digest}}}"
        self._tokens.write_text(f"tokens:\n  - {entry}\n")
        self._token.write_text(TOKEN)

    def pod(self, name: str) -> Sidecar:
        sidecar = self._services.guarded_sidecar(
            name, auth_tokens_file=self._tokens, service_token_file=self._token
        )
        wait_until(lambda: name in self.peers())
        return sidecar

    def peers(self) -> list[str]:
        peers = get_json(f"{self._services.broker_url}/v1/peers")["peers"]
        return sorted(peer["id"] for peer in peers)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with Processes(tmp_path, quiet_environment()) as owner:
        yield Deployment(owner, tmp_path)


def test_a_model_is_scaled_under_load(deployment: Deployment) -> None:
    stays, leaves = deployment.pod("stays"), deployment.pod("leaves")
    here, there = Load(stays, 1), Load(leaves, 2)
    try:
        here.wait()
        there.wait()
        comes = deployment.pod("comes")
        here.wait()
        there.stores = False
        there.wait()
        # As Kubernetes does: the sidecar's hook, the end of vLLM, SIGTERM.
        hook = [sys.executable, "-m", "lmcache_sidecar.begin_drain", str(leaves.socket)]
        subprocess.run(hook, timeout=STOP_S, check=True)
        there.wait()
        there.stop()
        leaves.process.process.send_signal(signal.SIGTERM)
        assert leaves.process.process.wait(STOP_S) == 0
        wait_until(lambda: deployment.peers() == ["comes", "stays"])
        here.wait()
    finally:
        here.stop()
        there.stop()
    assert (here.failure, there.failure) == (None, None)
    check_found_at(stays, 2)
    check_found_at(comes, 2)
    check_found_at(comes, 1)
