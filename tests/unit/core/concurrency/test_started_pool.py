"""Work that is handed to threads is done once, or never, also when no thread can be started."""

from __future__ import annotations

import asyncio
import threading

import pytest
from lmcache_core.concurrency import LoopThread
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
