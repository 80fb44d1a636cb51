"""The sidecar is killed, or hangs, before, during and after loads and stores: every request ends in time, with the right tokens."""

from __future__ import annotations

import threading

import pytest

from tests.vllm.engines import CHUNK_SIZE, Ask, Engine, running_engine
from tests.vllm.models import LLAMA
from tests.vllm.processes import Service
from tests.vllm.references import prompt
from tests.vllm.sabotage import AFTER, BEFORE, Sabotage
from tests.vllm.sidecars import eventually, num_chunks
from tests.vllm.worlds import BOUND_S, EITHER_LOAD, World, fill

LOAD_POINTS = [("Stage", BEFORE), ("Stage", AFTER), ("Pin", BEFORE), ("Pin", AFTER), ("Release", BEFORE), ("Release", AFTER)]
STORE_POINTS = [("Reserve", BEFORE), ("Reserve", AFTER), ("Commit", BEFORE), ("Commit", AFTER)]


def come_back(engine: Engine, sidecar: Service, ask: Ask) -> None:
    """Wait until the engine stores and finds again."""

    def is_found() -> bool:
        engine.ask(ask)
        engine.reset()
        return num_chunks(sidecar) > 0 and engine.ask(ask).num_cached == CHUNK_SIZE

    eventually(is_found, "the engine does not find the sidecar again")
    engine.reset()


@EITHER_LOAD
@pytest.mark.timeout(300)
def test_killed_around_a_load(world: World, monkeypatch: pytest.MonkeyPatch, load: str) -> None:
    sidecar = world.sidecar()
    asks, answers = [], []
    with running_engine(world.options(lmcache_load=load)) as engine:
        for number, (message, when) in enumerate(LOAD_POINTS):
            ask = Ask(prompt(60 + number, 1000))
            fill(engine, sidecar, ask)
            with Sabotage(monkeypatch, message, when, sidecar.kill) as sabotage:
                answer = engine.ask(ask)
                assert sabotage.has_happened, f"{message} was not said"
            assert answer.took_s < BOUND_S, f"{when} {message}"
            asks.append(ask)
            answers.append(answer)
            engine.reset()
            sidecar.start()
            come_back(engine, sidecar, Ask(prompt(80 + number, 300)))
    world.references.check(answers, asks, LLAMA)


@pytest.mark.timeout(300)
def test_killed_around_a_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = world.sidecar()
    asks, answers = [], []
    with running_engine(world.options()) as engine:
        come_back(engine, sidecar, Ask(prompt(99, 300)))
        for number, (message, when) in enumerate(STORE_POINTS):
            ask = Ask(prompt(100 + number, 1000))
            with Sabotage(monkeypatch, message, when, sidecar.kill) as sabotage:
                answers.append(engine.ask(ask))
                eventually(lambda: sabotage.has_happened, f"{message} was not said")
            assert answers[-1].took_s < BOUND_S, f"{when} {message}"
            eventually(lambda: not sidecar.is_alive, "it was killed")
            engine.reset()
            answers.append(engine.ask(ask))
            asks += [ask, ask]
            sidecar.start()
            come_back(engine, sidecar, Ask(prompt(120 + number, 300)))
            answers.append(engine.ask(ask))
            asks.append(ask)
    world.references.check(answers, asks, LLAMA)


@EITHER_LOAD
@pytest.mark.timeout(300)
def test_frozen_in_the_middle(world: World, monkeypatch: pytest.MonkeyPatch, load: str) -> None:
    """It holds its sockets open and answers nobody, and comes to itself later."""
    sidecar = world.sidecar()
    asks, answers = [], []
    with running_engine(world.options(lmcache_load=load)) as engine:
        for number, (message, when) in enumerate(
            [("Stage", BEFORE), ("Pin", BEFORE), ("Pin", AFTER), ("Reserve", BEFORE), ("Commit", BEFORE)]
        ):
            ask = Ask(prompt(140 + number, 1000))
            if message in ("Stage", "Pin"):
                fill(engine, sidecar, ask)
            with Sabotage(monkeypatch, message, when, sidecar.freeze) as sabotage:
                answers.append(engine.ask(ask))
                eventually(lambda: sabotage.has_happened, f"{message} was not said")
            assert answers[-1].took_s < BOUND_S, f"{when} {message}"
            engine.reset()
            answers.append(engine.ask(ask))
            assert answers[-1].took_s < BOUND_S, f"after {message}"
            asks += [ask, ask]
            sidecar.thaw()
            engine.reset()
            come_back(engine, sidecar, Ask(prompt(160 + number, 300)))
    world.references.check(answers, asks, LLAMA)


@EITHER_LOAD
def test_killed_and_restarted_again_and_again(world: World, load: str) -> None:
    """While requests come and go: a killer beside the engine, at no chosen point."""
    disk = {"disk_path": world.owner.directory / "disk", "disk_gb": 0.5}
    sidecar = world.sidecar(**disk)
    asks = [Ask(prompt(180 + i, 700 + 100 * i)) for i in range(4)]
    is_over = threading.Event()

    def trouble() -> None:
        while not is_over.wait(0.7):
            sidecar.kill()
            sidecar.start()

    with running_engine(world.options(lmcache_load=load)) as engine:
        killer = threading.Thread(target=trouble)
        killer.start()
        try:
            answers = []
            for _ in range(8):
                answers += engine.generate(asks)
                engine.reset()
        finally:
            is_over.set()
            killer.join()
        assert max(answer.took_s for answer in answers) < 4 * BOUND_S
        eventually(lambda: engine.ask(asks[0]).num_cached >= 0 and num_chunks(sidecar) > 0, "it is back")
    world.references.check(answers, asks * 8, LLAMA)


def test_a_restarted_sidecar_serves_what_is_on_its_disk(world: World) -> None:
    disk = {"disk_path": world.owner.directory / "disk", "disk_gb": 0.5}
    sidecar = world.sidecar(**disk)
    ask = Ask(prompt(190, 1000))
    with running_engine(world.options()) as engine:
        fill(engine, sidecar, ask)
        eventually(lambda: sidecar.get("/v1/status")["settled"], "written to the disk")
        sidecar.kill()
        sidecar.start(arena_path=world.owner.directory / "another-arena")
        eventually(lambda: num_chunks(sidecar, "LocalDiskBackend") >= 3, "the disk has been read")

        def is_found() -> bool:
            engine.reset()
            return engine.ask(ask).num_cached == 3 * CHUNK_SIZE

        eventually(is_found, "the engine finds what is on the disk")
        engine.reset()
        hit = engine.ask(ask)
        assert hit.num_cached == 3 * CHUNK_SIZE
    world.references.check([hit], [ask], LLAMA)
