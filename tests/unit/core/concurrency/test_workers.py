"""Threads for copies and digests: used while there are any, and no work is lost without them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from lmcache_core.concurrency import Workers
from lmcache_core.concurrency import workers as module
from lmcache_core.concurrency.workers import MAX_THREADS

from tests.fixtures.limits import without_threads
from tests.fixtures.waiting import threads_end

PATIENCE_S = 60.0
NUM_SUBMITTERS = 4
NUM_TURNS = 30


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(module, "CLOSE_WAIT_S", PATIENCE_S)
    made = Workers("test-worker", 2)
    made.open()
    yield made
    made.close()
    threads_end("test-worker")


class Something:
    """What work is given."""


def thread_name() -> str:
    return threading.current_thread().name


def fail(*_: object) -> None:
    raise LookupError("as expected")


@pytest.mark.parametrize("was_open", [True, False])
def test_work_runs_in_the_callers_thread_when_not_open(was_open: bool) -> None:
    workers = Workers("test-worker")
    if was_open:
        workers.open()
        workers.close()
    assert workers.submit(thread_name).result() == thread_name()
    assert workers.map(lambda i: (i, thread_name()), range(2)) == [
        (0, thread_name()),
        (1, thread_name()),
    ]


def test_close_waits_for_running_work(workers: Workers) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        has_begun.set()
        return may_end.wait(PATIENCE_S)

    future = workers.submit(work)
    assert has_begun.wait(PATIENCE_S)
    threading.Timer(0.01, may_end.set).start()
    workers.close()
    assert future.done()
    workers.close()


def test_work_runs_once_where_no_thread_can_be_started(workers: Workers) -> None:
    ran: list[str] = []
    may_end = threading.Event()
    busy = workers.submit(may_end.wait, PATIENCE_S)
    with without_threads():
        future = workers.submit(lambda: ran.append(thread_name()))
        assert workers.map(lambda i: i, range(3)) == [0, 1, 2]
    assert future.done()
    may_end.set()
    assert busy.result()
    workers.close()
    assert ran == [thread_name()]


def test_work_that_a_thread_took_meanwhile_is_left_to_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that was busy becomes free while another one is being started in vain."""
    ran: list[str] = []
    may_end, has_begun, has_failed = threading.Event(), threading.Event(), threading.Event()
    busy = workers.submit(may_end.wait, PATIENCE_S)

    def fail_to_start(_: threading.Thread) -> None:
        may_end.set()
        assert has_begun.wait(PATIENCE_S)
        raise RuntimeError("can't start new thread")

    def work() -> None:
        ran.append(thread_name())
        has_begun.set()
        assert has_failed.wait(PATIENCE_S)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail_to_start)
        future = workers.submit(work)
    has_failed.set()
    future.result(PATIENCE_S)
    assert busy.result()
    assert len(ran) == 1
    assert ran[0].startswith("test-worker")


def test_an_exception_does_not_hold_what_work_was_given(workers: Workers) -> None:
    given = Something()
    gone = weakref.ref(given)
    gc.disable()
    try:
        future = workers.submit(fail, given)
        assert isinstance(future.exception(PATIENCE_S), LookupError)
        del future, given
        workers.close()
        assert gone() is None
    finally:
        gc.enable()


def test_close_between_submits_loses_no_work() -> None:
    for _ in range(NUM_TURNS):
        workers = Workers("test-worker", 2)
        workers.open()
        results: list[Future[int]] = []
        start = threading.Barrier(NUM_SUBMITTERS + 1)

        def submit(
            workers: Workers = workers,
            results: list[Future[int]] = results,
            start: threading.Barrier = start,
        ) -> None:
            start.wait()
            results.extend(workers.submit(abs, -number) for number in range(20))

        threads = [threading.Thread(target=submit) for _ in range(NUM_SUBMITTERS)]
        for thread in threads:
            thread.start()
        start.wait()
        workers.close()
        for thread in threads:
            thread.join()
        found = sorted(future.result(PATIENCE_S) for future in results)
        assert found == sorted(list(range(20)) * NUM_SUBMITTERS)


def test_caller_and_threads_share_the_items_of_a_map(workers: Workers) -> None:
    meeting = threading.Barrier(2)

    def meet(i: int) -> tuple[int, str]:
        meeting.wait(PATIENCE_S)
        return i, thread_name()

    numbers, names = zip(*workers.map(meet, range(8)), strict=True)
    assert numbers == tuple(range(8))
    assert thread_name() in names
    assert any(name.startswith("test-worker") for name in names)


def test_map_waits_for_no_busy_thread_and_holds_nothing_for_it(workers: Workers) -> None:
    may_end = threading.Event()
    busy = [workers.submit(may_end.wait, PATIENCE_S) for _ in range(2)]
    item = Something()
    is_gone = weakref.ref(item)
    assert set(workers.map(lambda _: thread_name(), [item] * 8)) == {thread_name()}
    assert not busy[0].done()
    del item
    gc.collect()
    assert is_gone() is None
    may_end.set()
    assert all(future.result() for future in busy)


def test_an_error_ends_a_map_once_begun_work_has_ended(workers: Workers) -> None:
    meeting, ended = threading.Barrier(2), list[int]()

    def fail_for_first(i: int) -> None:
        meeting.wait(PATIENCE_S)
        if i == 0:
            fail()
        ended.append(i)

    with pytest.raises(LookupError, match="as expected"):
        workers.map(fail_for_first, [0, 1])
    assert ended == [1]
    begun: list[int] = []

    def note_and_fail(i: int) -> None:
        begun.append(i)
        fail()

    with pytest.raises(LookupError):
        workers.map(note_and_fail, range(100))
    assert len(begun) <= 2


def test_close_leaves_work_that_does_not_end(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_WAIT_S", 0.01)
    may_end = threading.Event()
    future = workers.submit(may_end.wait, PATIENCE_S)
    workers.close()
    assert not future.done()
    may_end.set()
    assert future.result()


def test_number_of_threads_is_bounded() -> None:
    workers = Workers("test-worker")
    workers.open()
    futures = [workers.submit(thread_name) for _ in range(50 * MAX_THREADS)]
    assert 1 <= len({future.result() for future in futures}) <= MAX_THREADS
    workers.close()
