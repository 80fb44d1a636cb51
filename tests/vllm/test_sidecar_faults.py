"""The sidecar is killed, or hangs, before, during and after loads and stores: every request ends
in time, with the right tokens.
"""

from __future__ import annotations

import threading

import pytest

from tests.vllm.engines import CHUNK_SIZE, Ask, running_engine
from tests.vllm.models import LLAMA
from tests.vllm.processes import Service
from tests.vllm.references import prompt
from tests.vllm.sabotage import AFTER, BEFORE, Sabotage
from tests.vllm.sidecars import eventually
from tests.vllm.worlds import BOUND_S, World, await_found, fill

LOAD_POINTS = [
    ("STAGE", BEFORE),
    ("STAGE", AFTER),
    ("LOAD", BEFORE),
    ("LOAD", AFTER),
    ("DONE", BEFORE),
]
STORE_POINTS = [("RESERVE", BEFORE), ("RESERVE", AFTER), ("COMMIT", BEFORE), ("COMMIT", AFTER)]


@pytest.mark.timeout(300)
def test_killed_around_a_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = world.sidecar()
    asks, answers = [], []
    with running_engine(world.options()) as engine:
        for number, (message, when) in enumerate(LOAD_POINTS):
            ask, other = Ask(prompt(60 + number, 1000)), Ask(prompt(80 + number, 300))
            fill(engine, sidecar, ask)
            with Sabotage(monkeypatch, message, when, sidecar.kill) as sabotage:
                answer = engine.ask(ask)
                assert sabotage.has_happened, f"{message} was not said"
            assert answer.took_s < BOUND_S, f"{when} {message}"
            asks.append(ask)
            answers.append(answer)
            engine.reset()
            sidecar.start()
            await_found(engine, other)
    world.references.check(answers, asks, LLAMA)


@pytest.mark.timeout(300)
def test_killed_around_a_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = world.sidecar()
    asks, answers = [], []
    with running_engine(world.options()) as engine:
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
            await_found(engine, ask)
            answers.append(engine.ask(ask))
            asks.append(ask)
    world.references.check(answers, asks, LLAMA)


@pytest.mark.parametrize(
    ("message", "when"),
    [
        ("STAGE", BEFORE),
        ("LOAD", BEFORE),
        ("DONE", BEFORE),
        ("RESERVE", BEFORE),
        ("COMMIT", BEFORE),
    ],
)
def test_frozen_in_the_middle(
    world: World, monkeypatch: pytest.MonkeyPatch, message: str, when: str
) -> None:
    """It holds its sockets open and answers nothing: one request waits a bounded time, those
    after it do not wait; later it is back.
    """
    sidecar = world.sidecar()
    ask, others = Ask(prompt(140, 1000)), [Ask(prompt(141 + i, 600)) for i in range(3)]
    with running_engine(world.options(lmcache_tier_timeout_s=1.0)) as engine:
        if message not in ("RESERVE", "COMMIT"):
            fill(engine, sidecar, ask)
        with Sabotage(monkeypatch, message, when, sidecar.freeze) as sabotage:
            frozen = engine.ask(ask)
            eventually(lambda: sabotage.has_happened, f"{message} was not said")
        assert frozen.took_s < BOUND_S
        meanwhile = [engine.ask(other) for other in others]
        assert sum(answer.took_s for answer in meanwhile) < BOUND_S
        sidecar.thaw()
        engine.reset()
        await_found(engine, ask)
        hit = engine.ask(ask)
    world.references.check([frozen, *meanwhile, hit], [ask, *others, ask], LLAMA)


class Trouble:
    """A sidecar that is killed and started again, at no chosen moment, by a thread of its own.

    Args:
        sidecar: It runs, and will at the end.
    """

    def __init__(self, sidecar: Service) -> None:
        self._sidecar = sidecar
        self._is_over = threading.Event()
        self._is_quiet = threading.Event()
        self._may_end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_kills = 0

    def __enter__(self) -> Trouble:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._may_end.set()
        self._thread.join()

    def calm_down(self) -> None:
        """No more kills. The thread lives on: its children would not outlive it."""
        self._is_over.set()
        assert self._is_quiet.wait(60.0), "the sidecar does not start"

    def _run(self) -> None:
        while not self._is_over.wait(0.5):
            self._sidecar.kill()
            self._sidecar.start()
            self.num_kills += 1
        self._is_quiet.set()
        self._may_end.wait()


def test_killed_and_restarted_again_and_again(world: World) -> None:
    """While requests come and go."""
    sidecar = world.sidecar(disk_path=world.owner.directory / "disk", disk_gb=0.5)
    asks = [Ask(prompt(180 + i, 700 + 100 * i)) for i in range(4)]
    with running_engine(world.options()) as engine, Trouble(sidecar) as trouble:
        answers = []
        while trouble.num_kills < 4 or len(answers) < 20:
            answers += engine.generate(asks)
            engine.reset()
        trouble.calm_down()
        assert max(answer.took_s for answer in answers) < 2 * BOUND_S
        await_found(engine, asks[3])
    world.references.check(answers, asks * (len(answers) // 4), LLAMA)


@pytest.mark.parametrize("place", ["arena", "disk"])
def test_a_restarted_sidecar_serves_what_is_left(world: World, place: str) -> None:
    disk = {"disk_path": world.owner.directory / "disk", "disk_gb": 0.5} if place == "disk" else {}
    sidecar = world.sidecar(**disk)
    ask = Ask(prompt(190, 1000))
    with running_engine(world.options()) as engine:
        fill(engine, sidecar, ask)
        eventually(lambda: sidecar.get("/v1/status")["settled"], "written to the disk")
        sidecar.kill()
        if place == "disk":
            sidecar.start(arena_path=world.owner.directory / "another-arena")
        else:
            sidecar.start()
        await_found(engine, Ask(prompt(191, 300)))  # the connection is back
        num_stored = engine.metrics()["vllm:lmcache_stored_chunks"]
        await_found(engine, ask)
        hit = engine.ask(ask)
        assert hit.num_cached == 3 * CHUNK_SIZE
        assert engine.metrics()["vllm:lmcache_stored_chunks"] == num_stored, "it was stored again"
    world.references.check([hit], [ask], LLAMA)
