"""Stores in threads: how long a step waits for copies of the blocks that it overwrites."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lmcache_core.integrations.vllm import store_threads
from lmcache_core.integrations.vllm.plan import Store
from lmcache_core.integrations.vllm.store_threads import PendingStore, StoreThreads

PATIENCE_S = 0.2


class LateEvent:
    """The end of a step on a device, which takes longer than a step waits for copies."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + 2 * PATIENCE_S

    def query(self) -> bool:
        return time.monotonic() >= self._ends_at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._ends_at - time.monotonic()))


@pytest.fixture
def threads() -> Iterator[StoreThreads]:
    """They copy to memory that is not pinned: each launch waits until the step has ended."""

    def begin(pending: PendingStore) -> Callable[[], None]:
        assert pending.computed is not None
        pending.computed.synchronize()
        threads.launched(pending, ())
        return lambda: given_up.append(pending.is_given_up)

    given_up: list[bool] = []
    threads = StoreThreads(begin, PATIENCE_S)
    threads.open()
    yield threads
    threads.close()
    assert given_up == [False]


def test_a_step_that_still_runs_is_no_reason_to_give_up_its_stores(threads: StoreThreads) -> None:
    event: Any = LateEvent()
    assert threads.submit(PendingStore(Store("r", ()), 1, 0.0, event))
    threads.before_overwriting({"r"})
    assert not threads.reads("r")


def test_what_is_not_copied_when_threads_are_closed_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's memory may be gone by then."""
    gate, given_up = threading.Event(), list[bool]()

    def begin(pending: PendingStore) -> Callable[[], None]:
        assert gate.wait(60.0)
        threads.launched(pending, ())
        return lambda: given_up.append(pending.is_given_up)

    monkeypatch.setattr(store_threads, "JOIN_S", PATIENCE_S)
    threads = StoreThreads(begin, PATIENCE_S)
    threads.open()
    for _ in range(2):
        assert threads.submit(PendingStore(Store("r", ()), 1, 0.0, None))
    threads.close()
    gate.set()
    for thread in threads._threads:
        thread.join(60.0)
    assert given_up == [True, True]
