"""Copies out of vLLM's blocks that land late, when vLLM has other uses for the blocks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmcache_core.gpu_connectors import PagedGPUConnector
from lmcache_core.integrations.vllm import store_threads
from lmcache_core.telemetry import STORED_CHUNKS_TOTAL, UNSTORED_CHUNKS_TOTAL

from tests.fixtures.sidecar import RunningSocket, running_socket
from tests.fixtures.vllm_engine import FULL, STATE, Engine, Limits, Shape, running, window
from tests.fixtures.vllm_engine.memory import POISON
from tests.fixtures.vllm_engine.stores import WrappedStore
from tests.fixtures.vllm_engine.worlds import prompt, with_sidecar

PATIENCE_S = 60.0
LATE_S = 0.3


class LateStore(WrappedStore):
    """Reserves and returns chunks only while the gate is open."""

    gate = threading.Event()
    is_waited_for = threading.Event()

    def reserve(self, *args: Any) -> Any:
        self.is_waited_for.set()
        assert self.gate.wait(PATIENCE_S)
        return self.inner.reserve(*args)

    def get(self, *args: Any, **options: Any) -> Any:
        self.is_waited_for.set()
        assert self.gate.wait(PATIENCE_S)
        return self.inner.get(*args, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The gate, which is open at the beginning and in the end."""
    one = threading.Event()
    one.set()
    monkeypatch.setattr(LateStore, "gate", one)
    yield one
    one.set()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[RunningSocket]:
    with running_socket(tmp_path) as one:
        yield one


@contextlib.contextmanager
def late_engine(
    module: ModuleType,
    model: Path,
    sidecar: RunningSocket,
    shape: Shape,
    limits: Limits,
    **options: Any,
) -> Iterator[Engine]:
    """An engine that copies nothing until the gate opens."""
    extra = with_sidecar(sidecar.path, **options)
    with running(module, model, extra, shape=shape, limits=limits, wrap_store=LateStore) as engine:
        LateStore.gate.clear()
        yield engine


def open_soon(gate: threading.Event) -> None:
    threading.Timer(LATE_S, gate.set).start()


def counted(engine: Engine, name: str) -> int:
    return sum(worker.counted(name) for worker in engine.workers)


def check_stored(engine: Engine, number: int, num_tokens: int) -> None:
    """Load a prompt: the engine raises if what was stored is not its KV."""
    engine.settle()
    engine.forget()
    assert engine.tally(engine.ask(prompt(number, num_tokens))).num_external >= num_tokens - 8
    engine.forget()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_blocks=14),
        Shape((FULL, window(6)), num_blocks=26),
        Shape(num_ranks=2, num_blocks=14),
        Shape((FULL, STATE), block_size=8, num_blocks=11),
    ],
    ids=["full", "hybrid", "two ranks", "state"],
)
def test_a_finished_request_keeps_its_blocks_until_they_are_copied(
    module: ModuleType, model: Path, sidecar: RunningSocket, gate: threading.Event, shape: Shape
) -> None:
    """There is room for one of two prompts."""
    with late_engine(module, model, sidecar, shape, Limits(64)) as engine:
        requests = [engine.add(prompt(number, 41)) for number in (1, 2)]
        while not any(request.status.is_finished for request in requests):
            engine.step()
        assert not gate.is_set(), "the first token waits for its store"
        # Either may be first: a prompt whose lookup is not answered yet is overtaken
        assert not all(request.computed for request in requests)
        open_soon(gate)
        engine.run()
        assert counted(engine, UNSTORED_CHUNKS_TOTAL) == 0
        check_stored(engine, 1, 41)
        check_stored(engine, 2, 41)


def test_a_step_waits_for_copies_of_a_preempted_request(
    module: ModuleType, model: Path, sidecar: RunningSocket, gate: threading.Event
) -> None:
    limits = Limits(64, reserves_whole_prompt=False)
    with late_engine(module, model, sidecar, Shape(num_blocks=14), limits) as engine:
        requests = [engine.add(prompt(number, 24), 20) for number in (1, 2)]
        while not all(request.computed for request in requests):
            engine.step()
        open_soon(gate)
        engine.run()
        assert sum(request.num_preemptions for request in requests) > 0
        assert counted(engine, UNSTORED_CHUNKS_TOTAL) == 0
        check_stored(engine, 1, 25)
        check_stored(engine, 2, 25)


def test_what_is_not_copied_in_time_is_not_stored(
    module: ModuleType,
    model: Path,
    sidecar: RunningSocket,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step waits for it, at most an eighth of `tier_timeout_s`."""
    limits = Limits(64, reserves_whole_prompt=False)
    shape = Shape(num_blocks=14)
    waits: list[float | None] = []
    wait_for = threading.Condition.wait_for

    def noted(condition: threading.Condition, met: Any, timeout: float | None = None) -> Any:
        waits.append(timeout)
        return wait_for(condition, met, timeout)

    with late_engine(module, model, sidecar, shape, limits, tier_timeout_s=0.5) as engine:
        requests = [engine.add(prompt(number, 24), 20) for number in (1, 2)]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Condition, "wait_for", noted)
            while not any(request.num_preemptions for request in requests):
                engine.step()
        assert set(waits) == {0.5 / 8}
        gate.set()
        engine.run()
        (preempted,) = (request for request in requests if request.num_preemptions)
        assert counted(engine, UNSTORED_CHUNKS_TOTAL) == 3
        engine.forget()
        assert engine.ask(preempted.prompt_token_ids, 20).output == preempted.output
        engine.forget()


def test_what_was_copied_from_overwritten_blocks_is_not_published(
    module: ModuleType,
    model: Path,
    sidecar: RunningSocket,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy began before, and ends after a step has waited for it long enough."""
    copy, begun = PagedGPUConnector.from_gpu, threading.Event()

    def late(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)
        copy(*args, **kwargs)

    extra = with_sidecar(sidecar.path, tier_timeout_s=0.5)
    with running(module, model, extra, limits=Limits(64)) as engine:
        monkeypatch.setattr(PagedGPUConnector, "from_gpu", late)
        gate.clear()
        request = engine.add(prompt(1, 24))
        while not request.computed:
            engine.step()
        assert begun.wait(PATIENCE_S)
        engine.workers[0].stores.before_overwriting(None)
        gate.set()
        engine.run()
        assert counted(engine, STORED_CHUNKS_TOTAL) == 0
        assert counted(engine, UNSTORED_CHUNKS_TOTAL) == 3
        engine.forget()


@pytest.mark.parametrize(
    ("shape", "num_generated"),
    [
        (Shape(num_blocks=14, zeroes_early=True), 20),
        (Shape((FULL, window(6)), num_blocks=20, zeroes_early=True), 1),
        (Shape((FULL, STATE), block_size=8, num_blocks=11, zeroes_early=True), 20),
    ],
    ids=["preempted", "before a window", "state"],
)
def test_blocks_overwritten_before_the_connector_is_told_are_not_stored(
    module: ModuleType,
    model: Path,
    sidecar: RunningSocket,
    gate: threading.Event,
    shape: Shape,
    num_generated: int,
) -> None:
    """Copies that begin when the connector hears of it are too late."""
    limits = Limits(16, reserves_whole_prompt=False)
    with late_engine(module, model, sidecar, shape, limits, tier_timeout_s=0.5) as engine:
        connector = engine.workers[0].connector
        handle = connector.handle_preemptions

        def opening(plan: Any) -> None:
            if plan.overwritten:
                gate.set()
            handle(plan)

        connector.handle_preemptions = opening
        requests = [engine.add(prompt(number, 24), num_generated) for number in (1, 2)]
        engine.run()
        assert gate.is_set(), "nothing was overwritten"
        engine.settle()
        engine.forget()
        for request in requests:
            again = engine.ask(request.prompt_token_ids, num_generated)
            assert again.output == request.output
            engine.forget()
        assert counted(engine, UNSTORED_CHUNKS_TOTAL) > 0


@pytest.mark.parametrize("is_load", [False, True])
def test_memory_is_unmapped_when_copies_have_ended(
    module: ModuleType, model: Path, sidecar: RunningSocket, gate: threading.Event, is_load: bool
) -> None:
    """As vLLM does to sleep. The memory has other contents when it wakes up."""
    with late_engine(module, model, sidecar, Shape(num_blocks=64), Limits(64)) as engine:
        (worker,) = engine.workers
        assert worker.connector.supports_sleep_mode(None)
        if is_load:
            gate.set()
            engine.ask(prompt(1, 41))
            engine.forget()
            gate.clear()
        engine.add(prompt(1, 41))
        LateStore.is_waited_for.clear()
        while not LateStore.is_waited_for.is_set():
            engine.step()
        unmapping = threading.Thread(target=worker.connector.unregister_kv_caches)
        unmapping.start()
        unmapping.join(LATE_S)
        assert unmapping.is_alive(), "copies are underway"
        gate.set()
        unmapping.join(PATIENCE_S)
        assert not unmapping.is_alive()
        engine.run()
        worker.connector.unregister_kv_caches()
        for tensor in worker.memory.by_name.values():
            tensor.fill_(POISON)
        worker.connector.restore_kv_caches()
        worker.connector.restore_kv_caches()
        engine.forget()
        check_stored(engine, 1, 41)


def test_copies_above_the_limit_are_dropped(
    module: ModuleType,
    model: Path,
    sidecar: RunningSocket,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_threads, "MAX_STORING_BYTES", 1)
    with late_engine(module, model, sidecar, Shape(num_blocks=64), Limits(64)) as engine:
        for number, num_tokens in ((1, 24), (2, 16)):
            request = engine.add(prompt(number, num_tokens))
            while not request.computed:
                engine.step()
        assert counted(engine, UNSTORED_CHUNKS_TOTAL) == 2
        gate.set()
        engine.run()
        assert counted(engine, STORED_CHUNKS_TOTAL) == 3
        engine.forget()
