"""The bridge: each result reaches exactly one owner, waits end, and a closed loop is an error that
callers know.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from lmcache_core.concurrency import LoopThread, bridge
from lmcache_core.concurrency.started_pool import loop_pool
from lmcache_core.errors import ConfigError, UnavailableError

from tests.fixtures.limits import without_threads
from tests.fixtures.waiting import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("test")
    made.open()
    yield made
    made.close(PATIENCE_S)


async def give(value: int) -> int:
    return value


async def fail(error: BaseException) -> int:
    raise error


def test_loop_without_a_thread_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_loop_that_does_not_stop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made = LoopThread("stubborn-loop")
    made.open()
    gate, has_begun = threading.Event(), threading.Event()

    async def hold() -> None:
        has_begun.set()
        gate.wait(PATIENCE_S)

    made.submit(hold())
    assert has_begun.wait(PATIENCE_S)
    made.close(0.01)
    assert "stubborn-loop" in caplog.text
    gate.set()
    made.close(PATIENCE_S)


def test_results_and_failures_reach_the_caller(loop: LoopThread) -> None:
    assert loop.run(give(3), PATIENCE_S) == 3
    with pytest.raises(ConfigError, match="wrong"):
        loop.run(fail(ConfigError("wrong")), PATIENCE_S)
    with pytest.raises(UnavailableError):
        loop.run(fail(TimeoutError()), PATIENCE_S)


def test_work_that_takes_too_long_is_cancelled_and_its_late_result_discarded(
    loop: LoopThread,
) -> None:
    discarded: list[int] = []

    async def end_when_cancelled() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 7

    def is_discarded() -> bool:
        with pytest.raises(UnavailableError, match="no result"):
            loop.run(end_when_cancelled(), 0.01, discarded.append)
        return bool(discarded)

    wait_until(is_discarded)  # on a busy machine, work may be cancelled before its first step
    assert set(discarded) == {7}


@pytest.mark.parametrize("timeout_s", [0.0, 0.0005])
def test_late_result_is_discarded_and_none_is_lost(loop: LoopThread, timeout_s: float) -> None:
    """Work and its caller's deadline end together. Whichever is first, each result is either
    returned or discarded.
    """
    begun: list[int] = []
    discarded: list[int] = []
    returned: list[int] = []

    async def work(number: int) -> int:
        begun.append(number)  # work that is cancelled before its first step has no result
        return number

    for number in range(200):
        with contextlib.suppress(UnavailableError):
            returned.append(loop.run(work(number), timeout_s, discarded.append))
    loop.run(give(0), PATIENCE_S)  # after all others
    assert sorted(discarded + returned) == begun


def test_closing_ends_a_call_that_waits(loop: LoopThread) -> None:
    has_begun, faults = threading.Event(), list[BaseException]()

    async def endless() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.run(endless(), 600.0)
        except UnavailableError as exc:
            faults.append(exc)

    caller = threading.Thread(target=wait)
    caller.start()
    assert has_begun.wait(PATIENCE_S)
    loop.close(PATIENCE_S)
    caller.join(PATIENCE_S)
    assert len(faults) == 1


def test_call_that_comes_too_late_to_begin_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is scheduled when the loop has stopped, and is not closed yet."""
    is_calling, has_stopped, is_scheduled = (threading.Event() for _ in range(3))
    made, refused = LoopThread("test"), list[UnavailableError]()

    def call() -> None:
        with pytest.raises(UnavailableError) as refusal:
            made.run(give(1), 600.0)
        refused.append(refusal.value)

    caller = threading.Thread(target=call)

    class ClosedLate(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
            if threading.current_thread() is not caller:
                return super().call_soon_threadsafe(*args, **options)
            is_calling.set()
            assert has_stopped.wait(PATIENCE_S)
            handle = super().call_soon_threadsafe(*args, **options)
            is_scheduled.set()
            return handle

        def close(self) -> None:
            has_stopped.set()
            assert is_scheduled.wait(PATIENCE_S)
            super().close()

    monkeypatch.setattr(asyncio, "new_event_loop", ClosedLate)
    made.open()
    caller.start()
    assert is_calling.wait(PATIENCE_S)
    made.close(PATIENCE_S)
    caller.join(PATIENCE_S)
    assert len(refused) == 1


def test_closed_loop_refuses_calls() -> None:
    loop = LoopThread("test")
    loop.open()
    loop.close()
    with pytest.raises(UnavailableError, match="closed"):
        loop.run(give(1), 1.0)
    with pytest.raises(UnavailableError, match="closed"):
        loop.submit(give(1))
