"""Loads and stores in threads: their bounds, and how long a step waits for them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lmcache_core.integrations.vllm import store_threads
from lmcache_core.integrations.vllm import worker as module
from lmcache_core.integrations.vllm.plan import Load, Store
from lmcache_core.integrations.vllm.store_threads import PendingStore, StoreThreads
from lmcache_core.integrations.vllm.worker import LoadResult, LoadThreads

from tests.fixtures.waiting import wait_until

PATIENCE_S = 60.0


def load_of(name: str) -> Load:
    return Load(name, 0, 8, ())


def good(load: Load) -> LoadResult:
    return LoadResult(load.request_id, frozenset())


def refused(load: Load) -> LoadResult:
    return LoadResult(load.request_id, frozenset(), 0)


class Loads:
    """Loads whose chunks are found at once, and whose copies wait at a gate.

    Attributes:
        ends: What ends each.
        asked: Those whose chunks were asked for.
        copying: Is set while one is copied.
        given_back: Those that were given back without a copy.
    """

    def __init__(self) -> None:
        self.gate, self.copying = threading.Event(), threading.Event()
        self.ends: list[weakref.ref[Any]] = []
        self.asked: list[str] = []
        self.given_back: list[str] = []

    def begin(self, load: Load, after: object) -> Callable[[bool], LoadResult]:
        self.asked.append(load.request_id)

        def end(is_copied: bool) -> LoadResult:
            if not is_copied:
                self.given_back.append(load.request_id)
                return refused(load)
            self.copying.set()
            assert self.gate.wait(PATIENCE_S)
            return good(load)

        self.ends.append(weakref.ref(end))
        return end


def num_threads() -> int:
    names = "lmcache-gets", "lmcache-loads"
    return sum(thread.name in names for thread in threading.enumerate())


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
def threads(loads: Loads) -> Iterator[LoadThreads]:
    made = LoadThreads(loads.begin, refused)
    made.open()
    yield made
    made.close()
    loads.gate.set()
    wait_until(lambda: not num_threads())


def successes(threads: LoadThreads) -> dict[str, bool]:
    """Whether each load that has ended succeeded."""
    return {result.request_id: result.first_bad is None for result in threads.take_results()}


def test_loads_beyond_the_limit_are_refused(
    loads: Loads, threads: LoadThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOADS", 3)
    for name in ("runs", "waits", "waits too", "too many"):
        threads.submit(load_of(name))
    assert successes(threads) == {"too many": False}
    loads.gate.set()
    assert threads.wait_for_all(PATIENCE_S)
    assert successes(threads) == {"runs": True, "waits": True, "waits too": True}


def test_one_load_is_asked_for_while_another_one_is_copied(
    loads: Loads, threads: LoadThreads
) -> None:
    """And no third one, whose chunks would be held for longer."""
    for name in "abc":
        threads.submit(load_of(name))
    assert loads.copying.wait(PATIENCE_S)
    wait_until(lambda: len(loads.asked) == 2)
    threads.wait(0.01)
    assert loads.asked == ["a", "b"]
    loads.gate.set()
    assert threads.wait_for_all(PATIENCE_S)
    assert loads.asked == ["a", "b", "c"]
    assert [result.request_id for result in threads.take_results()] == ["a", "b", "c"]


def test_close_lets_the_running_load_end_and_refuses_the_others(
    loads: Loads, threads: LoadThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it does not end, vLLM ends all the same, and the store holds nothing for the others."""
    monkeypatch.setattr(module, "JOIN_S", 0.01)
    for name in ("hangs", "was asked for", "waits"):
        threads.submit(load_of(name))
    assert loads.copying.wait(PATIENCE_S)
    wait_until(lambda: len(loads.asked) == 2)
    threads.close()
    assert loads.given_back == ["was asked for"]
    loads.gate.set()
    assert threads.wait_for_all(PATIENCE_S)
    assert successes(threads) == {"hangs": True, "was asked for": False, "waits": False}
    assert loads.asked == ["hangs", "was asked for"]


def test_waiter_is_woken_by_the_first_result(loads: Loads, threads: LoadThreads) -> None:
    threads.wait(PATIENCE_S)  # no load is underway
    threads.submit(load_of("a"))
    threads.submit(load_of("b"))
    threads.wait(0.01)
    assert threads.take_results() == []
    waiter = threading.Thread(target=threads.wait, args=(10 * PATIENCE_S,))
    waiter.start()
    loads.gate.set()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()
    threads.wait(PATIENCE_S)  # a result is there
    assert threads.take_results()[0].request_id == "a"


class Stores:
    """Store threads whose copies are launched when a gate opens.

    Attributes:
        ends: What ends each.
        given_up: Whether each store that has ended was given up.
    """

    def __init__(self, patience_s: float) -> None:
        self.gate = threading.Event()
        self.ends: list[weakref.ref[Any]] = []
        self.given_up: list[bool] = []
        self.threads = StoreThreads(self._begin, patience_s)
        self.threads.open()

    def submit(self, computed: Any = None) -> None:
        assert self.threads.submit(PendingStore(Store("r", ()), 1, 0.0, computed))

    def _begin(self, pending: PendingStore) -> Callable[[], None]:
        assert self.gate.wait(PATIENCE_S)
        self.threads.launched(pending, ())

        def end() -> None:
            self.given_up.append(pending.is_given_up)

        self.ends.append(weakref.ref(end))
        return end


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


def test_idle_threads_keep_nothing_of_what_they_have_copied(
    loads: Loads, threads: LoadThreads
) -> None:
    """The sidecar's memory is mapped, and pinned, as long as a chunk in it is referenced."""
    stores = Stores(0.01)
    stores.gate.set()
    stores.submit()
    assert stores.threads.wait(PATIENCE_S)
    loads.gate.set()
    threads.submit(load_of("a"))
    assert threads.wait_for_all(PATIENCE_S)
    assert [end() for end in stores.ends + loads.ends] == [None, None]
    stores.threads.close()
