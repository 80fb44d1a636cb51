"""Stores in threads: how long a step waits for copies of the blocks that it overwrites."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from lmcache_core.integrations.vllm import store_threads
from lmcache_core.integrations.vllm.plan import Store
from lmcache_core.integrations.vllm.store_threads import PendingStore, StoreThreads

from tests.fixtures.waiting import wait_until

PATIENCE_S = 60.0


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
