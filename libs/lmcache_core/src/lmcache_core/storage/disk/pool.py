"""Threads for blocking file operations: bounded, and joined when their tier closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from lmcache_core.errors import UnavailableError
from lmcache_core.record import Result, release_all

T = TypeVar("T")


class FilePool:
    """A bounded pool of threads. `submit` may be called from any thread, the coroutines belong to
    one loop.

    Args:
        name: Prefix of the threads' names.
        num_threads: Bound on file operations at once.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._running: set[Future[Any]] = set()

    def check_open(self) -> None:
        """Raise `UnavailableError` unless it takes work."""
        if self._pool is None:
            raise UnavailableError(f"{self.name} is not open")

    def open(self) -> None:
        """Take work from now on; threads start when there is some."""
        assert self._pool is None, "a pool is opened once"
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix=self.name)

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `work` in a thread; the caller owns the future, which is cancelled when the pool
        closes before its turn.

        Raises:
            UnavailableError: The pool is not open.
        """
        try:
            if self._pool is None:
                raise RuntimeError  # as the pool itself says it, if it is closed in this moment
            future = self._pool.submit(work, *arguments)
        except RuntimeError as exc:
            raise UnavailableError(f"{self.name} is not open") from exc
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    async def run(
        self, work: Callable[..., T], *arguments: Any, discard: Callable[[T], object] | None = None
    ) -> T:
        """What `work` gives. When the caller is cancelled, work that has begun goes on.

        Args:
            work: Blocking.
            arguments: For it.
            discard: Gives back what the result owns, when there is nobody any more to take it.

        Raises:
            UnavailableError: The pool is not open, or was closed before it came to this work.
        """
        return await self.result_of(self.submit(work, *arguments), discard)

    async def result_of(self, future: Future[T], discard: Callable[[T], object] | None = None) -> T:
        """What a future of `submit` gives; see `run`."""
        try:
            await wait_all([future])
        except BaseException:
            abandon(future, discard)
            raise
        if future.cancelled():
            raise UnavailableError(f"{self.name} was closed")
        return future.result()

    async def close(self, wait_s: float) -> bool:
        """Cancel what has not begun and let the rest end, for `wait_s` seconds. Idempotent.

        Returns:
            Whether all of it has ended; if not, threads are still in it.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            return not self._running
        pool.shutdown(wait=False, cancel_futures=True)
        if self._running:
            await wait_all(list(self._running), wait_s)
        if self._running:
            return False
        # The threads only have to give back the memory of reads that nothing waited for.
        await asyncio.to_thread(pool.shutdown)
        return True


async def wait_all(futures: Sequence[Future[Any]], timeout_s: float | None = None) -> None:
    """Wait until they are done; what they hold is read from them afterwards. Cancelling the wait
    cancels none of them.
    """
    if not futures:
        return
    done, _ = await asyncio.wait(
        [asyncio.wrap_future(future) for future in futures], timeout=timeout_s
    )
    for future in done:
        if not future.cancelled():
            future.exception()  # seen, so that it is not reported as overlooked


def abandon(
    future: Future[T],
    discard: Callable[[T], object] | None,
    never_run: Callable[[], object] | None = None,
) -> None:
    """Wait for work no longer, and see that what it holds is given back.

    Args:
        future: Of the work.
        discard: Called with its result, once it has one.
        never_run: Called instead if the work had not begun, and never will.
    """
    if future.cancel():
        if never_run is not None:
            never_run()
    elif discard is not None:
        future.add_done_callback(partial(_discard, discard))


def _discard(discard: Callable[[T], object], future: Future[T]) -> None:
    if not future.cancelled() and future.exception() is None:
        discard(future.result())


def release_result(result: Result | None) -> None:
    """Give back a result that nobody takes: `discard` for reads."""
    release_all([result])
