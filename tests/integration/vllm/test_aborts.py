"""Requests that end before their time, in every state; and blocks that a load may still write
to.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmcache_core.engine import ChunkStore
from lmcache_core.integrations.vllm.worker import MAX_REST_S, LoadThread

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

PATIENCE_S, IDLE_S = 60.0, 0.0005
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        Shape(num_blocks=40),
        Shape((FULL, window(6)), num_blocks=60),
        Shape((FULL, STATE), block_size=8, num_blocks=30),
    ],
    ids=["full", "hybrid", "state"],
)


class GatedStore(WrappedStore):
    """Loads wait at a gate, when it is shut."""

    def __init__(self, inner: ChunkStore) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        assert self.gate.wait(PATIENCE_S)
        return self.inner.get(*args, **kwargs)


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
        manager = self.gates[0].inner
        assert manager._staging.num_tickets == 0  # type: ignore[attr-defined]
        hot = manager._hot  # type: ignore[attr-defined]
        hot.check_integrity()
        assert hot.stats()["arena_used_bytes"] == hot.stats()["used_bytes"]


def steps_until(engine: Engine, request: Request, status: Status, num_computed: int = 0) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while request.status is not status or request.num_computed_tokens < num_computed:
        assert time.monotonic() < deadline, (
            f"it is {request.status.value} at {request.num_computed_tokens}"
        )
        if not engine.step():
            time.sleep(IDLE_S)


@SHAPES
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_blocks_that_are_being_loaded_into_are_nobody_elses(
    module: ModuleType, model: Path, shape: Shape, policy: str
) -> None:
    """The client has gone, the load has not: its blocks come back when it has ended, and not
    before.
    """
    world = World(module, model, shape, policy=policy)
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


@SHAPES
@pytest.mark.parametrize(
    ("status", "num_computed"),
    [
        (Status.WAITING, 0),
        (Status.WAITING_FOR_REMOTE_KVS, 0),
        (Status.RUNNING, 1),
        (Status.RUNNING, 45),
    ],
    ids=["waiting", "loading", "in the middle of its prompt", "generating"],
)
def test_every_state(
    module: ModuleType, model: Path, shape: Shape, status: Status, num_computed: int
) -> None:
    world = World(module, model, shape)
    with world as engine:
        world.shut(status is Status.WAITING_FOR_REMOTE_KVS)
        request = engine.add(prompt(1, 43) if num_computed != 1 else prompt(3, 43), 20)
        steps_until(engine, request, status, num_computed)
        engine.abort(request)
        engine.abort(request)
        world.shut(False)
        engine.run()
        assert request.status is Status.FINISHED_ABORTED
        engine.forget()
        assert engine.tally(engine.ask(prompt(1, 43), 3)).num_external >= 39


def test_preempted(module: ModuleType, model: Path) -> None:
    with World(module, model, Shape(num_blocks=20)) as engine:
        first, second = engine.add(prompt(4, 24), 40), engine.add(prompt(5, 24), 40)
        steps_until(engine, second, Status.PREEMPTED)
        engine.abort(second)
        engine.run()
        assert first.status is Status.FINISHED_STOPPED


def test_a_load_that_fails_for_a_client_that_has_gone(module: ModuleType, model: Path) -> None:
    """What is told of it must not hit a request that has its blocks by then."""
    world = World(module, model, Shape(num_blocks=40))
    with world as engine:
        world.shut(True)
        loading = engine.add(prompt(1, 43))
        steps_until(engine, loading, Status.WAITING_FOR_REMOTE_KVS)
        engine.abort(loading)
        other = engine.add(prompt(1, 40) + prompt(2, 10), 5)
        world.gates[0].inner._hot.clear_now()  # type: ignore[attr-defined]
        world.shut(False)
        engine.run()
        assert other.status is Status.FINISHED_STOPPED


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside another"])
def test_a_step_waits_for_a_load_only_where_nothing_else_can_go_on(
    module: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    world = World(module, model, Shape(num_blocks=60))
    with world as engine:
        waits: list[float] = []
        monkeypatch.setattr(LoadThread, "wait", lambda thread, limit_s: waits.append(limit_s))
        other = None if is_alone else engine.add(prompt(2, 20), 12)
        world.shut(True)
        loading = engine.add(prompt(1, 43))
        steps_until(engine, loading, Status.WAITING_FOR_REMOTE_KVS)
        waits.clear()
        for _ in range(5):
            engine.step()
        assert other is None or not other.status.is_finished
        assert waits == ([MAX_REST_S] * 5 if is_alone else [])
