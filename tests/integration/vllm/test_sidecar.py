"""The connector at a real sidecar process: what it finds, and what becomes of it when the
sidecar hangs, dies, or comes late.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmcache_core.engine import ChunkStore
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record.chunk_store import NotLent
from lmcache_demo.processes import Process
from lmcache_demo.settings import quiet_environment

from tests.fixtures.processes import Processes
from tests.fixtures.vllm_engine import (
    FULL,
    MLA,
    Engine,
    GroupShape,
    Limits,
    Shape,
    Status,
    running,
    window,
)
from tests.fixtures.vllm_engine.stores import WrappedStore
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE, beside, prompt

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 0.5
BOUND_S = 6.0
"""What a hanging sidecar may cost requests together: a few waits, and the machine is busy."""
PATIENCE_S = 60.0


@dataclass
class Sidecar:
    """A running sidecar."""

    process: Process
    socket: Path
    port: int

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
            body: dict[str, Any] = json.loads(response.read())
            return body

    def num_chunks(self) -> int:
        return int(self.get("/v1/tiers")["tiers"]["memory"]["num_chunks"])

    def check_nothing_held(self) -> None:
        for client in self.get("/v1/clients")["clients"]:
            assert (client["num_pins"], client["num_reservations"]) == (0, 0), client
        figures = self.get("/v1/tiers")["tiers"]["memory"]
        assert figures["arena_used_bytes"] == figures["used_bytes"]


def start(processes: Processes, directory: Path, name: str = "sidecar") -> Sidecar:
    settings = {
        "port": 0,
        "lm_port": 0,
        "instance_id": name,
        "socket_path": directory / "s.sock",
        "arena_path": directory / "arena",
        "arena_gb": 0.005,
    }
    process, ports = processes.start_service(name, "lmcache_sidecar", settings)
    return Sidecar(process, directory / "s.sock", ports["port"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """One for all tests that leave it alive; each has a model of its own there."""
    directory = tmp_path_factory.mktemp("shared")
    with Processes(directory, quiet_environment(PYTHONPATH=str(ROOT))) as owner:
        yield start(owner, directory)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """For tests that stop and kill."""
    with Processes(tmp_path, quiet_environment(PYTHONPATH=str(ROOT))) as owner:
        yield owner


@pytest.fixture
def own_model(model: Path, request: pytest.FixtureRequest) -> Path:
    """A model whose KV no other test has stored."""
    (model / "model.safetensors").write_text(request.node.nodeid)
    return model


def eventually(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)


def hits(engine: Engine, number: int) -> int:
    """Tokens of a prompt that are loaded; vLLM forgets it again."""
    request = engine.ask(prompt(number, 43), 2)
    assert request.status is Status.FINISHED_STOPPED
    engine.forget()
    return engine.tally(request).num_external


def test_a_second_engine_finds_what_the_first_has_stored(
    any_module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    extra = beside(shared.socket)
    with running(any_module, own_model, extra, limits=Limits(16)) as engine:
        assert hits(engine, 1) == 0
        assert hits(engine, 1) == 40
    with running(any_module, own_model, extra) as engine:
        assert hits(engine, 1) == 40
        shared.check_nothing_held()


@pytest.mark.parametrize(
    ("groups", "replicas", "copies"),
    [((FULL,), 1, 2), ((FULL, window(6)), 1, 2), ((MLA,), 2, 1)],
    ids=["split by heads", "hybrid", "the same latent on both"],
)
def test_two_ranks(
    module: ModuleType,
    own_model: Path,
    shared: Sidecar,
    groups: tuple[GroupShape, ...],
    replicas: int,
    copies: int,
) -> None:
    """A chunk is there when all ranks have stored it; what is the same on both ranks is stored
    once.
    """
    shape = Shape(groups, num_blocks=96, num_ranks=2, replicas=replicas)
    with running(module, own_model, beside(shared.socket), shape=shape) as engine:
        before = shared.num_chunks()
        assert hits(engine, 1) == 0
        assert shared.num_chunks() - before == 5 * copies * len(groups)
        assert hits(engine, 1) == 40
        shared.check_nothing_held()


def test_chunks_that_one_rank_lacks_are_not_offered(
    module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    class Deaf(WrappedStore):
        """Has no room for the last chunks of this rank."""

        def reserve(self, keys: Any, shapes: Any, dtype: str) -> list[MemoryObj | NotLent]:
            some: list[MemoryObj | NotLent] = self.inner.reserve(keys[:2], shapes[:2], dtype)
            return some + [NotLent.NO_ROOM] * (len(shapes) - 2)

    stores: list[Any] = []

    def wrap(store: Any) -> Any:
        stores.append(Deaf(store) if len(stores) == 1 else store)
        return stores[-1]

    with running(
        module, own_model, beside(shared.socket), shape=Shape(num_ranks=2), wrap_store=wrap
    ) as engine:
        assert hits(engine, 1) == 0
        assert hits(engine, 1) == 2 * CHUNK_SIZE


def test_a_load_that_fails_on_one_rank_alone(
    module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    """The other one does not know, and what it computes in that step comes of KV that was wrong:
    it must not store it.
    """

    class Losing(WrappedStore):
        is_armed = False

        def get(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
            return [] if self.is_armed else self.inner.get(keys, *args, **kwargs)

    stores: list[Any] = []

    def wrap(store: Any) -> Any:
        stores.append(Losing(store))
        return stores[-1]

    extra = beside(shared.socket)
    with running(module, own_model, extra, shape=Shape(num_ranks=2), wrap_store=wrap) as engine:
        assert hits(engine, 1) == 0
        stores[1].is_armed = True
        failed = engine.ask(prompt(1, 40) + prompt(2, 24), 2)
        assert (failed.status, engine.tally(failed).num_loads) == (Status.FINISHED_STOPPED, 1)
        stores[1].is_armed = False
        engine.forget()
        assert engine.tally(engine.ask(prompt(1, 40) + prompt(2, 25), 2)).num_external == 64
        engine.forget()


def test_a_worker_that_cannot_use_its_memory_puts_the_engine_out(
    module: ModuleType, own_model: Path, shared: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """Its canary comes back with other bytes: from then on nothing is offered, not even what the
    other rank could load.
    """

    class Bending(WrappedStore):
        def __init__(self, inner: ChunkStore) -> None:
            super().__init__(inner)
            self.held: dict[int, MemoryObj] = {}

        def get(self, *args: Any, **kwargs: Any) -> Any:
            chunks = self.inner.get(*args, **kwargs)
            for chunk in chunks:
                held = chunk.memory
                chunk.memory = BytesBufferMemoryObj(
                    bytearray(byte ^ 1 for byte in held.byte_array), held.metadata
                )
                self.held[id(chunk)] = held
            return chunks

        def release(self, chunks: Any) -> bool:
            for chunk in chunks:
                chunk.memory = self.held.pop(id(chunk), chunk.memory)
            return self.inner.release(chunks)

    stores: list[Any] = []

    def wrap(store: Any) -> Any:
        stores.append(Bending(store) if len(stores) == 1 else store)
        return stores[-1]

    shape = Shape(num_ranks=2)
    with running(module, own_model, beside(shared.socket), shape=shape) as whole:
        assert hits(whole, 1) == 0
    with running(module, own_model, beside(shared.socket), shape=shape, wrap_store=wrap) as engine:
        assert "this worker neither loads nor stores" in caplog.text
        engine.ask(prompt(2, 20))
        assert [hits(engine, 1), hits(engine, 1)] == [0, 0]
        assert all(tally.num_loads == 0 for tally in engine.scheduler.tallies.values())


def test_replaced_weights_begin_a_new_epoch(
    module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    with running(module, own_model, beside(shared.socket)) as engine:
        hits(engine, 1)
        engine.replace_weights("new")
        assert [hits(engine, 1), hits(engine, 1)] == [0, 40]


def test_a_sidecar_that_hangs_costs_a_bounded_time(
    module: ModuleType, model: Path, processes: Processes, tmp_path: Path
) -> None:
    sidecar = start(processes, tmp_path)
    extra = beside(sidecar.socket, tier_timeout_s=TIMEOUT_S)
    with running(module, model, extra, limits=Limits(16)) as engine:
        assert [hits(engine, 1), hits(engine, 1)] == [0, 40]
        sidecar.process.process.send_signal(signal.SIGSTOP)
        try:
            begin = time.monotonic()
            requests = [engine.add(prompt(number, 43), 3) for number in range(1, 9)]
            engine.run(patience_s=4 * BOUND_S)
            took_s = time.monotonic() - begin
            engine.forget()
        finally:
            sidecar.process.process.send_signal(signal.SIGCONT)
        assert all(request.status is Status.FINISHED_STOPPED for request in requests)
        assert took_s < BOUND_S
        eventually(lambda: hits(engine, 1) == 40, "the sidecar goes on, and is not used again")


def test_a_sidecar_that_is_killed_and_one_that_follows(
    module: ModuleType, model: Path, processes: Processes, tmp_path: Path
) -> None:
    sidecar = start(processes, tmp_path)
    with running(module, model, beside(sidecar.socket), limits=Limits(16)) as engine:
        assert [hits(engine, 1), hits(engine, 1)] == [0, 40]
        requests = [engine.add(prompt(number, 43), 3) for number in (1, 2)]
        engine.step()
        sidecar.process.kill()
        engine.run()
        assert all(request.status is Status.FINISHED_STOPPED for request in requests)
        engine.forget()
        assert hits(engine, 1) == 0
        start(processes, tmp_path, "second")
        eventually(lambda: hits(engine, 3) == 40, "the second sidecar is not found")


def test_a_sidecar_that_comes_late(
    module: ModuleType, model: Path, processes: Processes, tmp_path: Path
) -> None:
    """vLLM starts and serves without one, and joins it when it is there; a salt that was not
    known before is no trouble.
    """
    with running(module, model, beside(tmp_path / "s.sock")) as engine:
        assert [hits(engine, 1), hits(engine, 1)] == [0, 0]
        waiting = engine.add(prompt(2, 43), 30)
        engine.step()
        start(processes, tmp_path)
        eventually(lambda: hits_beside(engine) == 40, "the sidecar is not found")
        engine.run()
        assert waiting.status is Status.FINISHED_STOPPED


def hits_beside(engine: Engine) -> int:
    """As `hits`, while another request may run."""
    first, again = engine.ask(prompt(1, 43), 1), None
    engine.forget()
    again = engine.ask(prompt(1, 43), 1)
    engine.forget()
    assert first.status is Status.FINISHED_STOPPED
    return engine.tally(again).num_external
