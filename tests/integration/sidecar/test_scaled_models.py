"""`kubectl scale` of models while their engines work: a pod comes, another one ends by its hook
and SIGTERM. Real processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, eventually, get_json
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 4
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
TOKEN = "sidecars-0123456789abcdef"
JOIN_S = 60.0
MIN_ROUNDS = 5


class Requests:
    """What a vLLM does for as long as it runs: it finds and loads what it has stored, and stores
    more.

    Attributes:
        stores: Whether it stores more; a sidecar that drains keeps nothing new.
        num_rounds: So far.
        wrong: What was not as it should be.
    """

    def __init__(self, sidecar: Sidecar, seed: int) -> None:
        self._sidecar = sidecar
        self._seed = seed
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.stores = True
        self.num_rounds = 0
        self.wrong: list[str] = []

    def start(self) -> None:
        self._thread.start()
        self.go_on()

    def go_on(self) -> None:
        """Until it has done a few more."""
        enough = self.num_rounds + MIN_ROUNDS
        eventually(lambda: self.num_rounds >= enough or not self._thread.is_alive(), JOIN_S)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with engine_at(self._sidecar.socket, **PATIENT) as engine:
                engine.store(
                    tokens_of(NUM_TOKENS, self._seed), kvcaches=random_kv(NUM_TOKENS, self._seed)
                )
                while not self._ends.wait(0.005):
                    self.wrong += read(self._sidecar, self._seed, engine)
                    if self.stores:
                        more = self._seed + 100 + self.num_rounds
                        engine.store(
                            tokens_of(CHUNK_SIZE, more), kvcaches=random_kv(CHUNK_SIZE, more)
                        )
                        self.wrong += (
                            []
                            if engine.lookup(tokens_of(CHUNK_SIZE, more)) == CHUNK_SIZE
                            else [f"{more} was not kept"]
                        )
                    self.num_rounds += 1
        except BaseException as exc:
            self.wrong.append(repr(exc))
            raise


def read(sidecar: Sidecar, seed: int, engine: object = None) -> list[str]:
    """Find and load tokens at a sidecar; what was wrong with it."""
    tokens, target = tokens_of(NUM_TOKENS, seed), empty_kv(NUM_TOKENS)
    with (
        contextlib.nullcontext(engine)
        if engine is not None
        else engine_at(sidecar.socket, **PATIENT)
    ) as reading:
        found = reading.lookup(tokens)
        loaded = int(reading.retrieve(tokens, kvcaches=target).sum())
    if (found, loaded) != (NUM_TOKENS, NUM_TOKENS):
        return [f"{seed}: {found} of {NUM_TOKENS} tokens found, {loaded} loaded"]
    assert_equal_prefix(target, random_kv(NUM_TOKENS, seed), NUM_TOKENS)
    return []


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, quiet_environment()) as owner:
        yield owner


class Deployment:
    """Pods of a model: their sidecars, which may hand over to one another."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self._house = Neighbourhood(processes, directory, default_lease_ttl_ms=6000)
        self._tokens, self._token = directory / "tokens.yaml", directory / "token"
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        self._tokens.write_text(
            "tokens:\n  - {name: sidecar, tenant: default, role: admin, token_sha256:"
            f" {digest}}}\n"
        )
        self._token.write_text(TOKEN)

    def pod(self, name: str) -> Sidecar:
        return self._house.guarded_sidecar(
            name, auth_tokens_file=self._tokens, service_token_file=self._token
        )

    def peers(self) -> list[str]:
        return sorted(
            peer["id"]
            for peer in get_json(f"{self._house.broker_url}/v1/peers")["peers"]
            if peer["incarnation"]
        )


def test_a_model_is_scaled_while_it_is_asked(processes: Processes, tmp_path: Path) -> None:
    deployment = Deployment(processes, tmp_path)
    stays, leaves = deployment.pod("stays"), deployment.pod("leaves")
    eventually(lambda: deployment.peers() == ["leaves", "stays"])
    here, there = Requests(stays, 1), Requests(leaves, 2)
    try:
        here.start()
        there.start()
        comes = deployment.pod("comes")
        eventually(lambda: "comes" in deployment.peers())
        here.go_on()
        # What Kubernetes does: the sidecar's hook, while vLLM answers what it has; the end of vLLM;
        # SIGTERM.
        there.stores = False
        hook = [sys.executable, "-m", "lmcache_sidecar.begin_drain", str(leaves.socket)]
        subprocess.run(hook, timeout=JOIN_S, check=True)
        there.go_on()
        there.stop()
        leaves.process.process.send_signal(signal.SIGTERM)
        assert leaves.process.process.wait(JOIN_S) == 0
        eventually(lambda: deployment.peers() == ["comes", "stays"])
        here.go_on()
    finally:
        here.stop()
        there.stop()
    assert here.wrong == there.wrong == []
    assert read(stays, 2) == read(comes, 2) == [], "its exclusive chunks are still found"
    assert read(comes, 1) == [], "the new pod reaches the chunks of the others"
