"""Loads that run next to the engine's steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from lmcache_core.integrations.vllm import worker as module
from lmcache_core.integrations.vllm.plan import Load
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


def test_loads_run_one_after_the_other(made: Callable[..., LoadThread]) -> None:
    thread = made()
    for i in range(20):
        thread.submit(load_of(str(i)))
    assert thread.wait_for_all(PATIENCE_S)
    assert [result.request_id for result in thread.take_results()] == [str(i) for i in range(20)]
    assert thread.take_results() == []


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


def test_load_that_does_not_end_is_logged(
    made: Callable[..., LoadThread],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "JOIN_S", 0.01)
    gate = Gate()
    thread = made(gate)
    thread.submit(load_of("a"))
    assert gate.has_begun.wait(PATIENCE_S)
    thread.close()
    gate.is_open.set()
    assert "load did not end" in caplog.text


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
