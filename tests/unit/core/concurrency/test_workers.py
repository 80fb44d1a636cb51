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

NUM_SUBMITTERS = 4
NUM_TURNS = 30


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("test-worker", 2)
    made.open()
    yield made
    made.close()


class Something:
    """What work is given."""


def thread_name() -> str:
    return threading.current_thread().name


def fail() -> None:
    raise LookupError("as told")


def test_work_runs_in_threads_of_that_name_while_open(workers: Workers) -> None:
    assert workers.submit(thread_name).result().startswith("test-worker")


def test_work_runs_side_by_side(workers: Workers) -> None:
    meeting = threading.Barrier(2)
    both = [workers.submit(meeting.wait, 5.0) for _ in range(2)]
    assert sorted(future.result() for future in both) == [0, 1]


@pytest.mark.parametrize("was_open", [True, False])
def test_work_runs_in_the_callers_thread_when_not_open(was_open: bool) -> None:
    workers = Workers("test-worker")
    if was_open:
        workers.open()
        workers.close()
    assert workers.submit(thread_name).result() == thread_name()


def test_what_work_raises_comes_with_the_future_or_at_once(workers: Workers) -> None:
    future = workers.submit(fail)
    with pytest.raises(LookupError, match="as told"):
        future.result()
    workers.close()
    with pytest.raises(LookupError, match="as told"):
        workers.submit(fail)


def test_arguments_are_passed_on(workers: Workers) -> None:
    assert workers.submit(divmod, 17, 5).result() == (3, 2)
    assert workers.submit(sorted, [1, 3, 2], reverse=True).result() == [3, 2, 1]


def test_close_waits_for_what_runs_and_may_be_called_again(workers: Workers) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return may_end.wait(5.0)

    future = workers.submit(work)
    begun.wait(5.0)
    threading.Timer(0.05, may_end.set).start()
    workers.close()
    assert future.done()
    assert future.result()
    workers.close()


def test_close_leaves_work_that_does_not_end(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_WAIT_S", 0.01)
    may_end = threading.Event()
    future = workers.submit(may_end.wait, 60.0)
    workers.close()
    assert not future.done()
    may_end.set()
    assert future.result()


def test_threads_are_joined() -> None:
    def num_threads() -> int:
        return sum(thread.name.startswith("joined") for thread in threading.enumerate())

    workers = Workers("joined", 3)
    workers.open()
    wait_for = [workers.submit(threading.Event().wait, 0.01) for _ in range(3)]
    for future in wait_for:
        future.result()
    assert num_threads() > 0
    workers.close()
    assert num_threads() == 0


def test_the_number_of_threads_is_bounded() -> None:
    workers = Workers("test-worker")
    workers.open()
    try:
        names = {
            future.result()
            for future in [workers.submit(thread_name) for _ in range(50 * MAX_THREADS)]
        }
        assert 1 <= len(names) <= MAX_THREADS
    finally:
        workers.close()


def test_work_runs_once_where_without_threads_can_be_started(workers: Workers) -> None:
    ran: list[str] = []
    may_end = threading.Event()
    busy = workers.submit(may_end.wait, 5.0)
    with without_threads():
        future = workers.submit(lambda: ran.append(thread_name()))
    assert future.done()
    may_end.set()
    assert busy.result()
    workers.close()
    assert ran == [thread_name()]


def test_work_that_ran_without_threads_is_let_go_and_threads_that_come_later_are_used(
    workers: Workers,
) -> None:
    given = Something()
    with without_threads():
        assert workers.submit(id, given).result() == id(given)
    gone = weakref.ref(given)
    del given
    assert gone() is None
    assert workers.submit(thread_name).result().startswith("test-worker")


def test_work_that_a_thread_took_meanwhile_is_left_to_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that was busy becomes free while another one is being started in vain."""
    ran: list[str] = []
    may_end, has_begun, has_failed = threading.Event(), threading.Event(), threading.Event()
    busy = workers.submit(may_end.wait, 5.0)

    def fail_to_start(_: threading.Thread) -> None:
        may_end.set()
        assert has_begun.wait(5.0)
        raise RuntimeError("can't start new thread")

    def work() -> str:
        ran.append(thread_name())
        has_begun.set()
        assert has_failed.wait(5.0)
        return "done"

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail_to_start)
        future = workers.submit(work)
    has_failed.set()
    assert future.result(5.0) == "done"
    assert busy.result()
    assert len(ran) == 1
    assert ran[0].startswith("test-worker")


def test_what_was_raised_does_not_hold_what_work_was_given(workers: Workers) -> None:
    def fail_with(_: Something) -> None:
        raise LookupError("as told")

    given = Something()
    gone = weakref.ref(given)
    gc.disable()
    try:
        future = workers.submit(fail_with, given)
        assert isinstance(future.exception(5.0), LookupError)
        del future, given
        workers.close()
        assert gone() is None
    finally:
        gc.enable()


def test_close_between_submits_loses_nothing() -> None:
    """Whoever submits while another thread closes gets a result all the same."""
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
        assert sorted(future.result(5.0) for future in results) == sorted(
            list(range(20)) * NUM_SUBMITTERS
        )


# --- map -----------------------------------------------------------------------------------------


def test_results_come_in_order(workers: Workers) -> None:
    assert workers.map(lambda i: i * i, range(100)) == [i * i for i in range(100)]
    assert workers.map(lambda i: i, []) == []


def test_the_caller_and_the_threads_share_the_items(workers: Workers) -> None:
    meeting = threading.Barrier(2)

    def meet(_: int) -> str:
        meeting.wait(5.0)
        return thread_name()

    names = workers.map(meet, range(8))
    assert thread_name() in names
    assert any(name.startswith("test-worker") for name in names)


def test_it_waits_for_no_thread_that_is_busy(workers: Workers) -> None:
    may_end = threading.Event()
    busy = [workers.submit(may_end.wait, 10.0) for _ in range(2)]
    assert set(workers.map(lambda _: thread_name(), range(8))) == {thread_name()}
    assert not busy[0].done()
    may_end.set()


def test_a_map_that_no_thread_has_joined_holds_nothing(workers: Workers) -> None:
    may_end = threading.Event()
    busy = [workers.submit(may_end.wait, 10.0) for _ in range(2)]
    item = Something()
    is_gone = weakref.ref(item)
    workers.map(id, [item, item])
    del item
    gc.collect()
    assert is_gone() is None
    may_end.set()
    assert all(future.result() for future in busy)


def test_an_error_ends_a_map_once_what_has_begun_has_ended(workers: Workers) -> None:
    meeting, ended = threading.Barrier(2), []

    def one_fails(i: int) -> None:
        meeting.wait(5.0)
        if i == 0:
            fail()
        ended.append(i)

    with pytest.raises(LookupError, match="as told"):
        workers.map(one_fails, [0, 1])
    assert ended == [1]
    begun: list[int] = []

    def note_and_fail(i: int) -> None:
        begun.append(i)
        fail()

    with pytest.raises(LookupError):
        workers.map(note_and_fail, range(100))
    assert len(begun) <= 2


def test_a_map_without_threads_is_a_loop(workers: Workers) -> None:
    assert Workers("closed").map(lambda i: (i, thread_name()), range(3)) == [
        (i, thread_name()) for i in range(3)
    ]
    with without_threads():
        assert workers.map(lambda i: i, range(3)) == [0, 1, 2]
