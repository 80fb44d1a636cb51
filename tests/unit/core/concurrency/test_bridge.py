"""The bridge: results reach exactly one owner, waits end, and a closed loop is an error that
callers know.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from lmcache_core.concurrency import LoopThread, bridge
from lmcache_core.concurrency.started_pool import loop_pool
from lmcache_core.errors import ConfigError, UnavailableError

from tests.fixtures.limits import without_threads


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("test")
    made.open()
    yield made
    made.close()


async def give(value: int, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return value


async def fail(error: BaseException) -> int:
    raise error


async def block(seconds: float) -> int:
    time.sleep(seconds)
    return 7


def test_a_loop_without_a_thread_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LoopThread("test-loop")
    with contextlib.ExitStack() as limits:

        def last_threads() -> ThreadPoolExecutor:
            pool = loop_pool()
            limits.enter_context(without_threads())
            return pool

        monkeypatch.setattr(bridge, "loop_pool", last_threads)
        with pytest.raises(UnavailableError, match="test-loop: can't start new thread"):
            made.open()
    made.close()


def test_a_loop_that_does_not_stop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made = LoopThread("stubborn-loop")
    made.open()
    gate, has_begun = threading.Event(), threading.Event()

    async def hold() -> None:
        has_begun.set()
        gate.wait(10)

    made.submit(hold())
    assert has_begun.wait(10)
    left, thread = made._loop, made._thread
    assert left is not None
    assert thread is not None
    made.close(0.1)
    gate.set()
    thread.join(10)
    left.close()
    assert "stubborn-loop" in caplog.text


def test_results_and_failures_reach_the_caller(loop: LoopThread) -> None:
    assert loop.run(give(3), 5.0) == 3
    with pytest.raises(ConfigError, match="wrong"):
        loop.run(fail(ConfigError("wrong")), 5.0)
    with pytest.raises(UnavailableError):
        loop.run(fail(TimeoutError()), 5.0)


def test_what_lasts_too_long_is_cancelled(loop: LoopThread) -> None:
    ended = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(UnavailableError, match="no result"):
        loop.run(endless(), 0.05)
    assert ended.wait(5.0)


@pytest.mark.parametrize("lateness_s", [-0.02, -0.002, 0.0, 0.002, 0.05])
def test_a_late_result_is_discarded_and_none_is_lost(loop: LoopThread, lateness_s: float) -> None:
    """Whatever the race, each result is either returned or discarded."""
    begun: list[
        int
    ] = []  # on a busy machine, one that is cancelled before its first step has no result
    discarded: list[int] = []
    returned: list[int] = []
    for number in range(30):
        with contextlib.suppress(UnavailableError):
            returned.append(
                loop.run(_unstoppable(begun, number, 0.03 + lateness_s), 0.03, discarded.append)
            )
    assert begun
    deadline = time.monotonic() + 60.0
    while len(discarded) + len(returned) < len(begun):
        assert time.monotonic() < deadline, "a result was lost"
        time.sleep(0.005)
    assert sorted(discarded + returned) == begun


async def _unstoppable(begun: list[int], value: int, after_s: float) -> int:
    """Ends with its result although it is cancelled, as a read that is complete does."""
    begun.append(value)
    until = time.monotonic() + after_s
    while (left_s := until - time.monotonic()) > 0:
        try:
            await asyncio.sleep(left_s)
        except asyncio.CancelledError:
            continue
    return value


def test_a_blocked_loop_does_not_hold_the_caller(loop: LoopThread) -> None:
    discarded: list[int] = []
    begin = time.monotonic()
    with pytest.raises(UnavailableError):
        loop.run(block(2.0), 0.05, discarded.append)
    assert time.monotonic() - begin < 1.9
    assert loop.run(give(1), 5.0) == 1
    assert discarded == [7]


def test_a_closed_loop_says_so() -> None:
    loop = LoopThread("test")
    loop.open()
    loop.close()
    with pytest.raises(UnavailableError, match="closed"):
        loop.run(give(1), 1.0)
    with pytest.raises(UnavailableError, match="closed"):
        loop.submit(give(1))


def test_closing_ends_those_who_wait(loop: LoopThread) -> None:
    faults: list[BaseException] = []

    def wait() -> None:
        try:
            loop.run(give(1, 60.0), 30.0)
        except UnavailableError as exc:
            faults.append(exc)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    loop.close()
    waiter.join(5.0)
    assert len(faults) == 1


def test_a_call_that_comes_too_late_to_begin_does_not_wait() -> None:
    """It is scheduled when the loop has stopped, and is not closed yet."""
    made, refused = LoopThread("test"), list[UnavailableError]()
    made.open()
    loop = made._loop
    assert loop is not None
    close = loop.close

    def call() -> None:
        with pytest.raises(UnavailableError) as refusal:
            made.run(give(1), 600.0)
        refused.append(refusal.value)

    caller = threading.Thread(target=call)

    def close_late() -> None:
        caller.start()
        while not made._unanswered:
            time.sleep(0.001)
        close()

    loop.close = close_late  # type: ignore[method-assign]
    loop.call_soon_threadsafe(made._is_over.set)
    made._thread.join(60)  # type: ignore[union-attr]
    caller.join(60)
    assert len(refused) == 1
    made.close()
