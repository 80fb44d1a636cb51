"""Loads and stores in threads: their bounds, and how long a step waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lmcache_core.integrations.vllm import store_threads
from lmcache_core.integrations.vllm import worker as module
from lmcache_core.integrations.vllm.plan import Load, Store
from lmcache_core.integrations.vllm.store_threads import PendingStore, StoreThreads
from lmcache_core.integrations.vllm.worker import LoadResult, LoadThread

from tests.fixtures.waiting import wait_until

PATIENCE_S = 60.0


def load_of(name: str) -> Load:
    return Load(name, 0, 8, ())


def good(load: Load, after: object = None) -> LoadResult:
    return LoadResult(load.request_id, frozenset())


def refused(load: Load) -> LoadResult:
    return LoadResult(load.request_id, frozenset(), 0)


class Gate:
    """A load that waits until it is let through."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.has_begun = threading.Event()

    def __call__(self, load: Load, after: object = None) -> LoadResult:
        self.has_begun.set()
        assert self.is_open.wait(PATIENCE_S)
        return good(load)


def num_threads() -> int:
    return sum(thread.name == "lmcache-loads" for thread in threading.enumerate())


@pytest.fixture
def made() -> Iterator[Callable[..., LoadThread]]:
    threads: list[LoadThread] = []

    def make(load: Callable[..., LoadResult] = good) -> LoadThread:
        threads.append(LoadThread(load, refused))
        threads[-1].open()
        return threads[-1]

    yield make
    for thread in threads:
        thread.close()
    wait_until(lambda: not num_threads())


def successes(thread: LoadThread) -> dict[str, bool]:
    """Whether each load that has ended succeeded."""
    return {result.request_id: result.first_bad is None for result in thread.take_results()}


def test_loads_beyond_the_limit_are_refused(
    made: Callable[..., LoadThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_LOADS", 2)
    gate = Gate()
    thread = made(gate)
    thread.submit(load_of("runs"))
    assert gate.has_begun.wait(PATIENCE_S)
    for name in ("waits", "waits too", "too many"):
        thread.submit(load_of(name))
    assert successes(thread) == {"too many": False}
    gate.is_open.set()
    assert thread.wait_for_all(PATIENCE_S)
    assert successes(thread) == {"runs": True, "waits": True, "waits too": True}


def test_close_lets_the_running_load_end_and_refuses_the_others(
    made: Callable[..., LoadThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it does not end, or the queue is full, vLLM ends all the same."""
    monkeypatch.setattr(module, "MAX_WAITING_LOADS", 2)
    monkeypatch.setattr(module, "JOIN_S", 0.01)
    gate = Gate()
    thread = made(gate)
    for name in ("hangs", "waits", "waits too"):
        thread.submit(load_of(name))
        assert gate.has_begun.wait(PATIENCE_S)
    thread.close()
    assert thread.take_results() == []
    gate.is_open.set()
    assert thread.wait_for_all(PATIENCE_S)
    assert successes(thread) == {"hangs": True, "waits": False, "waits too": False}


def test_waiter_is_woken_by_the_first_result(made: Callable[..., LoadThread]) -> None:
    gate = Gate()
    thread = made(gate)
    thread.wait(PATIENCE_S)  # no load is underway
    thread.submit(load_of("a"))
    thread.submit(load_of("b"))
    thread.wait(0.01)
    assert thread.take_results() == []
    waiter = threading.Thread(target=thread.wait, args=(10 * PATIENCE_S,))
    waiter.start()
    gate.is_open.set()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()
    thread.wait(PATIENCE_S)  # a result is there
    assert thread.take_results()[0].request_id == "a"


class Stores:
    """Store threads whose copies are launched when a gate opens.

    Attributes:
        given_up: Whether each store that has ended was given up.
    """

    def __init__(self, patience_s: float) -> None:
        self.gate = threading.Event()
        self.given_up: list[bool] = []
        self.threads = StoreThreads(self._begin, patience_s)
        self.threads.open()

    def submit(self, computed: Any = None) -> None:
        assert self.threads.submit(PendingStore(Store("r", ()), 1, 0.0, computed))

    def _begin(self, pending: PendingStore) -> Callable[[], None]:
        assert self.gate.wait(PATIENCE_S)
        self.threads.launched(pending, ())
        return lambda: self.given_up.append(pending.is_given_up)


class RunningStep:
    """The end of a step on a device: the wait for it opens a gate.

    Copies to memory that is not pinned are launched when the step has ended.
    """

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def query(self) -> bool:
        return self._gate.is_set()

    def synchronize(self) -> None:
        self._gate.set()


def test_running_step_is_no_reason_to_give_up_its_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than a step waits for copies."""
    stores = Stores(0.01)
    stores.submit(RunningStep(stores.gate))
    wait_for = threading.Condition.wait_for

    def patient(condition: threading.Condition, predicate: Any, _: float | None = None) -> Any:
        limit_s = PATIENCE_S if stores.gate.is_set() else 0.0
        return wait_for(condition, predicate, limit_s)

    monkeypatch.setattr(threading.Condition, "wait_for", patient)
    stores.threads.before_overwriting({"r"})
    assert not stores.threads.reads("r")
    stores.threads.close()
    assert stores.given_up == [False]


def test_store_that_is_not_copied_when_threads_are_closed_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's memory may be gone by then."""
    monkeypatch.setattr(store_threads, "JOIN_S", 0.01)
    stores = Stores(0.01)
    for _ in range(2):
        stores.submit()
    stores.threads.close()
    stores.gate.set()
    wait_until(lambda: stores.given_up == [True, True])
