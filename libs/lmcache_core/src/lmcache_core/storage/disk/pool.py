"""Threads for blocking file operations: bounded, and joined when their tier closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lmcache_core.errors import UnavailableError
from lmcache_core.record import Result, release_all

T = TypeVar("T")
R = TypeVar("R", bound=Result | None)


@dataclass(slots=True)
class ChunkJob(Generic[R]):
    """Work in a thread that owns references until it ends, then its result does.

    Attributes:
        future: Of the work.
        unrun: Gives back what the work owns, if it never runs.
        has_ended: Whether it had when `finish` returned.
    """

    future: Future[R]
    unrun: Callable[[], object]
    has_ended: bool = False

    def take(self, late: R, closed: R) -> R:
        """Return what it has come to, after `finish`; to be called once.

        Args:
            late: Returned for work that has not ended, which is abandoned.
            closed: Returned for work that never ran since its pool was closed.
        """
        if self.future.cancelled():
            self.unrun()
            return closed
        if not self.has_ended:
            self.abandon()
            return late
        return self.future.result()

    def abandon(self) -> None:
        """Wait for it no longer: what it owns is given back as soon as its thread lets go."""
        abandon(self.future, release_result, self.unrun)


async def finish(jobs: Collection[ChunkJob[Any]], timeout_s: float | None = None) -> None:
    """Wait for jobs, at most `timeout_s` seconds, and raise what one of them raised. The caller
    takes or abandons each of them afterwards.
    """
    await wait_all([job.future for job in jobs], timeout_s)
    for job in jobs:
        job.has_ended = job.future.done()
        if job.has_ended and not job.future.cancelled():
            job.future.result()


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

    def begin(
        self, work: Callable[..., R], *arguments: Any, unrun: Callable[[], object]
    ) -> ChunkJob[R]:
        """Run work on chunks in a thread; see `ChunkJob`.

        Raises:
            UnavailableError: The pool is not open; what the work owns was given back.
        """
        try:
            return ChunkJob(self.submit(work, *arguments), unrun)
        except BaseException:
            unrun()
            raise

    async def run(
        self, work: Callable[..., T], *arguments: Any, discard: Callable[[T], object] | None = None
    ) -> T:
        """Return what `work` gives. When the caller is cancelled, work that has begun continues.

        Args:
            work: Blocking.
            arguments: For it.
            discard: Gives back what the result owns, when there is nobody any more to take it.

        Raises:
            UnavailableError: The pool is not open, or was closed before it came to this work.
        """
        return await self.result_of(self.submit(work, *arguments), discard)

    async def result_of(self, future: Future[T], discard: Callable[[T], object] | None = None) -> T:
        """Return what a future of `submit` gives; see `run`."""
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
        future.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else discard(done.result())
        )


def release_result(result: Result | None) -> None:
    """Give back a result that nobody takes: `discard` for reads."""
    release_all([result])
