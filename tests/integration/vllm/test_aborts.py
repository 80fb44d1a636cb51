"""Aborted requests, and blocks that a load may still write to."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmcache_core.engine import ChunkStore
from lmcache_core.integrations.vllm.worker import MAX_REST_S, LoadThreads

from tests.fixtures.vllm_engine import (
    FULL,
    STATE,
    Engine,
    Limits,
    Request,
    Shape,
    Status,
    running,
    window,
)
from tests.fixtures.vllm_engine.stores import WrappedStore
from tests.fixtures.vllm_engine.worlds import embedded, prompt
from tests.fixtures.waiting import wait_until

PATIENCE_S = 60.0
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        Shape(num_blocks=40),
        Shape((FULL, window(6)), num_blocks=60),
        Shape((FULL, STATE), block_size=8, num_blocks=30),
        Shape((FULL, STATE), block_size=8, num_blocks=40, num_drafts=3),
    ],
    ids=["full", "hybrid", "state", "drafts"],
)


class GatedStore(WrappedStore):
    """Loads wait at a gate, when it is shut."""

    def __init__(self, inner: ChunkStore) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.is_empty = False

    def get(self, *args: Any, **kwargs: Any) -> Any:
        assert self.gate.wait(PATIENCE_S)
        return [] if self.is_empty else self.inner.get(*args, **kwargs)


class World:
    """An engine that has stored a prompt and forgotten it, and whose loads can be held up."""

    def __init__(self, module: ModuleType, model: Path, shape: Shape, **options: Any) -> None:
        self.gates: list[GatedStore] = []
        extra = embedded(save_decode_cache=True)
        self.opened = running(
            module, model, extra, shape=shape, wrap_store=self.wrap, limits=Limits(16), **options
        )

    def wrap(self, store: ChunkStore) -> GatedStore:
        self.gates.append(GatedStore(store))
        return self.gates[-1]

    def shut(self, is_shut: bool) -> None:
        for gated in self.gates:
            (gated.gate.clear if is_shut else gated.gate.set)()

    def __enter__(self) -> Engine:
        self.engine = self.opened.__enter__()
        self.engine.ask(prompt(1, 40))
        self.engine.forget()
        return self.engine

    def __exit__(self, *args: Any) -> None:
        self.shut(False)
        if args[0] is None:
            self.engine.run()
            self.check_nothing_held()
        self.opened.__exit__(*args)

    def check_nothing_held(self) -> None:
        figures = self.gates[0].inner.stats()["memory"]
        assert figures["arena_used_bytes"] == figures["used_bytes"]


def steps_until(engine: Engine, request: Request, status: Status, num_computed: int = 0) -> None:
    def is_reached() -> bool:
        while request.status is not status or request.num_computed_tokens < num_computed:
            if not engine.step():
                return False
        return True

    wait_until(is_reached)


@SHAPES
def test_blocks_of_an_aborted_request_are_free_when_their_load_has_ended(
    module: ModuleType, model: Path, shape: Shape
) -> None:
    world = World(module, model, shape)
    with world as engine:
        world.shut(True)
        loading = engine.add(prompt(1, 43))
        steps_until(engine, loading, Status.WAITING_FOR_REMOTE_KVS)
        num_free = engine.scheduler.tables.pool.num_free
        engine.abort(loading)
        other = engine.add(prompt(2, 20), 3)
        while other.request_id in engine.scheduler.requests:
            engine.step()
        assert engine.scheduler.tables.pool.num_free == num_free
        world.shut(False)
        engine.run()
        assert engine.scheduler.tables.pool.num_free == shape.num_blocks - 1


def test_a_failed_load_of_an_aborted_request_hits_no_other(module: ModuleType, model: Path) -> None:
    world = World(module, model, Shape(num_blocks=40))
    with world as engine:
        world.shut(True)
        loading = engine.add(prompt(1, 43))
        steps_until(engine, loading, Status.WAITING_FOR_REMOTE_KVS)
        engine.abort(loading)
        other = engine.add(prompt(1, 40) + prompt(2, 10), 5)
        for gated in world.gates:
            gated.is_empty = True
        world.shut(False)
        engine.run()
        assert other.status is Status.FINISHED_STOPPED


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with another"])
def test_a_step_waits_for_a_load_only_if_nothing_else_runs(
    module: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    world = World(module, model, Shape(num_blocks=60))
    with world as engine:
        waits: list[float] = []
        monkeypatch.setattr(LoadThreads, "wait", lambda thread, limit_s: waits.append(limit_s))
        other = None if is_alone else engine.add(prompt(2, 20), 12)
        world.shut(True)
        loading = engine.add(prompt(1, 43))
        steps_until(engine, loading, Status.WAITING_FOR_REMOTE_KVS)
        waits.clear()
        for _ in range(5):
            engine.step()
        assert other is None or not other.status.is_finished
        assert waits == ([MAX_REST_S] * 5 if is_alone else [])
