"""Loads beside the engine's steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from lmcache_core.integrations.vllm import worker as module
from lmcache_core.integrations.vllm.plan import Load
from lmcache_core.integrations.vllm.worker import LoadResult, LoadThread

PATIENCE_S = 60.0


def load_of(name: str) -> Load:
    return Load(name, 0, 8, ())


def good(load: Load, after: object = None) -> LoadResult:
    return LoadResult(load.request_id, frozenset())


def refused(load: Load) -> LoadResult:
    return LoadResult(load.request_id, frozenset(), 0)


def results_of(thread: LoadThread, count: int) -> list[LoadResult]:
    results: list[LoadResult] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(results) < count:
        assert time.monotonic() < deadline, f"only {results}"
        results += thread.take_results()
        time.sleep(0.001)
    return results


class Gate:
    """A load that waits until it is let through."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.has_begun = threading.Event()

    def __call__(self, load: Load, after: object = None) -> LoadResult:
        self.has_begun.set()
        assert self.is_open.wait(PATIENCE_S)
        return good(load)


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
    assert not [thread for thread in threading.enumerate() if thread.name == "lmcache-loads"]


def test_loads_are_done_one_after_the_other(made: Callable[..., LoadThread]) -> None:
    thread = made()
    for i in range(20):
        thread.submit(load_of(str(i)))
    assert [result.request_id for result in results_of(thread, 20)] == [str(i) for i in range(20)]
    assert thread.take_results() == []


def test_a_load_that_does_not_end_is_said_to_be_left(
    made: Callable[..., LoadThread],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "JOIN_S", 0.1)
    gate = Gate()
    thread = made(gate)
    thread.submit(load_of("a"))
    assert gate.has_begun.wait(PATIENCE_S)
    thread.close()
    gate.is_open.set()
    assert "load did not end" in caplog.text
    thread._thread.join(PATIENCE_S)


def test_too_many_are_refused(
    made: Callable[..., LoadThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_LOADS", 2)
    gate = Gate()
    thread = made(gate)
    thread.submit(load_of("runs"))
    assert gate.has_begun.wait(PATIENCE_S)
    for name in ("waits", "waits too", "too many"):
        thread.submit(load_of(name))
    assert thread.take_results() == [refused(load_of("too many"))]
    gate.is_open.set()
    assert all(result.first_bad is None for result in results_of(thread, 3))


def test_closing_lets_one_end_and_refuses_the_rest(made: Callable[..., LoadThread]) -> None:
    gate = Gate()
    thread = made(gate)
    for name in ("runs", "waits"):
        thread.submit(load_of(name))
    assert gate.has_begun.wait(PATIENCE_S)
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread._is_closing.is_set():
        time.sleep(0.001)
    gate.is_open.set()
    closing.join(PATIENCE_S)
    thread.close()
    assert [result.first_bad is None for result in thread.take_results()] == [True, False]


def test_closing_does_not_wait_for_room_in_the_queue(
    made: Callable[..., LoadThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_LOADS", 2)
    monkeypatch.setattr(module, "JOIN_S", 0.1)
    gate = Gate()
    thread = made(gate)
    for name in ("hangs", "waits", "waits too"):
        thread.submit(load_of(name))
        assert gate.has_begun.wait(PATIENCE_S)
    closing = threading.Thread(target=thread.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    is_closed = not closing.is_alive()
    gate.is_open.set()
    assert is_closed, "a load that hangs, and a queue that is full, keep vLLM from ending"
    assert [result.first_bad is None for result in results_of(thread, 3)] == [True, False, False]
    thread._thread.join(PATIENCE_S)
    assert not thread._thread.is_alive()


def test_a_thread_that_was_never_opened_can_be_closed() -> None:
    LoadThread(good, refused).close()


def took_s(call: Callable[[], object]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


def test_who_waits_is_woken_by_the_first_result(made: Callable[..., LoadThread]) -> None:
    gate = Gate()
    thread = made(gate)
    thread.submit(load_of("a"))
    assert took_s(lambda: thread.wait(0.05)) >= 0.05, "nothing has come"
    threading.Timer(0.05, gate.is_open.set).start()
    assert took_s(lambda: thread.wait(PATIENCE_S)) < PATIENCE_S / 2
    assert [result.request_id for result in thread.take_results()] == ["a"]


def test_nobody_waits_for_what_is_there_or_cannot_come(made: Callable[..., LoadThread]) -> None:
    thread = made()
    assert took_s(lambda: thread.wait(PATIENCE_S)) < PATIENCE_S / 2
    thread.submit(load_of("r"))
    assert took_s(lambda: thread.wait(PATIENCE_S)) < PATIENCE_S / 2
    assert thread.take_results() == [good(load_of("r"))]
    assert took_s(lambda: thread.wait(PATIENCE_S)) < PATIENCE_S / 2
