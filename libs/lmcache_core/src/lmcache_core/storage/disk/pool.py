"""Threads for blocking file operations: bounded, and joined when their tier closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lmcache_core.concurrency import StartedPool
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Result, release_all

T = TypeVar("T")
R = TypeVar("R", bound=Result | None)


@dataclass(slots=True)
class ChunkJob(Generic[R]):
    """Work in a thread. It owns its references until it ends, then its result owns them.

    Attributes:
        unrun: Releases what the work owns if it never runs.
        has_ended: Whether the work had ended when `finish` returned.
    """

    future: Future[R]
    unrun: Callable[[], object]
    has_ended: bool = False

    def take(self, late: R, closed: R) -> R:
        """Return the result after `finish`. Call it once.

        Args:
            late: Returned for work that has not ended, which is abandoned.
            closed: Returned for work that never ran because its pool was closed.
        """
        if self.future.cancelled():
            self.unrun()
            return closed
        if not self.has_ended:
            self.abandon()
            return late
        return self.future.result()

    def abandon(self) -> None:
        """Stop waiting for the work; what it owns is released as soon as its thread is done."""
        abandon(self.future, release_result, self.unrun)


async def finish(jobs: Collection[ChunkJob[Any]], timeout_s: float | None = None) -> None:
    """Wait for jobs, at most `timeout_s` seconds, and raise any exception that one of them raised.
    The caller takes or abandons each job afterwards.
    """
    await wait_all([job.future for job in jobs], timeout_s)
    for job in jobs:
        job.has_ended = job.future.done()
        if job.has_ended and not job.future.cancelled():
            job.future.result()


class FilePool:
    """A bounded pool of threads. `submit` may be called from any thread; the coroutines belong to
    one loop.

    Args:
        name: Prefix of the threads' names.
        num_threads: Bound on concurrent file operations.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self._num_threads = num_threads
        self._pool: StartedPool | None = None
        self._running: set[Future[Any]] = set()

    def check_open(self) -> None:
        """Raise `UnavailableError` unless the pool accepts work."""
        if self._pool is None:
            raise UnavailableError(f"{self.name} is not open")

    def open(self) -> None:
        """Start the threads, and accept work from now on.

        Raises:
            UnavailableError: This process may not have that many more threads.
        """
        assert self._pool is None, "a pool can be opened only once"
        self._pool = StartedPool(self._num_threads, self.name)

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `work` in a thread. The caller owns the future, which is cancelled if the pool closes
        before the work begins.

        Raises:
            UnavailableError: The pool is not open.
        """
        try:
            if self._pool is None:
                raise RuntimeError  # as the pool itself raises if it is closed concurrently
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
            UnavailableError: The pool is not open; what the work owns was released.
        """
        try:
            return ChunkJob(self.submit(work, *arguments), unrun)
        except BaseException:
            unrun()
            raise

    async def run(
        self, work: Callable[..., T], *arguments: Any, discard: Callable[[T], object] | None = None
    ) -> T:
        """Return the result of `work`. If the caller is cancelled, work that has begun continues.

        Args:
            discard: Releases what the result owns if the caller is gone.

        Raises:
            UnavailableError: The pool is not open, or was closed before this work began.
        """
        return await self.result_of(self.submit(work, *arguments), discard)

    async def result_of(self, future: Future[T], discard: Callable[[T], object] | None = None) -> T:
        """Return the result of a future from `submit`; see `run`."""
        try:
            await wait_all([future])
        except BaseException:
            abandon(future, discard)
            raise
        if future.cancelled():
            raise UnavailableError(f"{self.name} was closed")
        return future.result()

    async def close(self, wait_s: float) -> bool:
        """Cancel work that has not begun and let the rest finish, for up to `wait_s` seconds.
        Idempotent.

        Returns:
            Whether all work has ended; if not, threads are still running.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            return not self._running
        pool.shutdown(wait=False, cancel_futures=True)
        # When the work has ended, its threads still release the memory of reads that nothing waits
        # for.
        await wait_all([pool.ended], wait_s)
        return not self._running


async def wait_all(futures: Sequence[Future[Any]], timeout_s: float | None = None) -> None:
    """Wait until the futures are done; the caller reads their results afterwards. Cancelling the
    wait cancels none of them.
    """
    if not futures:
        return
    waiting = [asyncio.wrap_future(future) for future in futures]
    for one in waiting:
        one.add_done_callback(_mark_retrieved)
    await asyncio.wait(waiting, timeout=timeout_s)


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an exception that the caller of `wait_all` handles."""
    if not future.cancelled():
        future.exception()


def abandon(
    future: Future[T],
    discard: Callable[[T], object] | None,
    never_run: Callable[[], object] | None = None,
) -> None:
    """Stop waiting for work and ensure that its result is released.

    Args:
        discard: Called with the result once there is one.
        never_run: Called instead if the work never runs.
    """
    if future.cancel():
        if never_run is not None:
            never_run()
    elif discard is not None:
        future.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else discard(done.result())
        )


def release_result(result: Result | None) -> None:
    """Release a result that is no longer wanted: `discard` for reads."""
    release_all([result])
