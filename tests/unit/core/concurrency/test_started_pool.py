"""Work that is handed to threads is done once, or never, also when no thread can be started."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from lmcache_core.concurrency import LoopThread, StartedPool, started_pool
from lmcache_core.errors import UnavailableError
from lmcache_core.storage.disk.pool import FilePool

from tests.fixtures.limits import without_threads


async def test_a_pool_that_is_open_needs_no_more_threads() -> None:
    pool = FilePool("test-pool", 2)
    pool.open()
    may_end, done = threading.Event(), list[str]()
    busy = pool.submit(may_end.wait)
    with without_threads():
        job = pool.begin(lambda: done.append("run"), unrun=lambda: done.append("unrun"))
    may_end.set()
    await asyncio.wrap_future(job.future)
    await asyncio.wrap_future(busy)
    await pool.close(5.0)
    assert done == ["run"]


async def test_a_pool_without_threads_does_not_open() -> None:
    pool = FilePool("test-pool", 2)
    with without_threads(), pytest.raises(UnavailableError, match="2 more threads"):
        pool.open()
    pool.open()
    await pool.close(5.0)


def test_the_loop_of_an_engine_needs_no_more_threads() -> None:
    loop = LoopThread("test-loop")
    loop.open()
    try:
        with without_threads():
            assert loop.run(asyncio.to_thread(lambda: 7), 5.0) == 7
    finally:
        loop.close()


def test_shutdown_leaves_work_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_pool, "SHUTDOWN_WAIT_S", 0.01)
    pool, may_end = StartedPool(1, "test-pool"), threading.Event()
    has_begun = threading.Event()

    def work() -> bool:
        has_begun.set()
        return may_end.wait(60)

    running = pool.submit(work)
    assert has_begun.wait(60)
    queued = pool.submit(may_end.wait)
    pool.shutdown(cancel_futures=True)
    assert not running.done()
    assert queued.cancelled()
    may_end.set()
    pool.ended.result(60)
    assert running.result()


def test_work_that_comes_during_shutdown_is_done_or_refused() -> None:
    """The pool takes no lock: each submit is either refused, or its work is done."""
    for _ in range(200):
        pool, done = StartedPool(2, "test-pool"), list[int]()
        accepted: list[int] = []
        start = threading.Barrier(2)

        def submit(
            pool: StartedPool = pool,
            done: list[int] = done,
            accepted: list[int] = accepted,
            start: threading.Barrier = start,
        ) -> None:
            start.wait()
            for number in range(20):
                with contextlib.suppress(RuntimeError):
                    pool.submit(done.append, number)
                    accepted.append(number)

        submitter = threading.Thread(target=submit)
        submitter.start()
        start.wait()
        pool.shutdown()
        submitter.join()
        pool.ended.result(60)
        assert sorted(done) == accepted
