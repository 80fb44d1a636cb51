"""A few threads for work on bytes that releases the GIL: copies and digests."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from lmcache_core.concurrency.close_apart import close_apart
from lmcache_core.forks import ProcessMark

MAX_THREADS = 4
"""More do not help: two or three concurrent copies or digests use all of the memory's bandwidth."""

CLOSE_WAIT_S = 10.0

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class _Task(Generic[T]):
    """Work that waits for a thread, and can be withdrawn while it has not begun."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call = call

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._call())
        except BaseException as exc:
            self.future.set_exception(exc)
            raise
        finally:
            del self  # else the exception would hold its own future, and all arguments of the work

    def was_taken_back(self) -> bool:
        """Withdraw the work unless a thread has begun it; if it is still in a queue, it then does
        nothing and holds nothing.
        """
        if not self.future.cancel():
            return False
        del self._call
        return True


class Workers:
    """Runs functions in threads while it is open, and in the caller's thread while it is not, if no
    thread can be started, or in a forked child of the process that has opened it.

    Args:
        name: Prefix of the threads' names.
        num_threads: By default one for each processor that this process may use, at most
            `MAX_THREADS`.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._name = name
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._process = ProcessMark()

    def open(self) -> None:
        """Allow threads, which are started on demand."""
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix=self._name)
        self._process = ProcessMark()

    def close(self) -> None:
        """Let running work finish, and join the threads, for up to `CLOSE_WAIT_S`. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None and self._process.is_here:
            close_apart(pool.shutdown, CLOSE_WAIT_S)

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `work` soon, exactly once; the caller waits for the future. Without threads, an
        exception of `work` is raised here.
        """
        task = _Task(partial(work, *args, **kwargs))
        if self._takes(task):
            return task.future
        done: Future[T] = Future()
        done.set_result(work(*args, **kwargs))
        return done

    def map(self, work: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Run `work` once for each item, in the caller's thread and in those that are free, and
        return the results in order. It never waits for a thread that is busy with something else.

        Raises:
            BaseException: An exception of `work`, once everything that has begun has ended; nothing
                begins after it.
        """
        results: dict[int, T] = {}
        numbers = itertools.count()  # next() is atomic
        has_failed = threading.Event()

        def take() -> None:
            try:
                while not has_failed.is_set() and (i := next(numbers)) < len(items):
                    results[i] = work(items[i])
            except BaseException:
                has_failed.set()
                raise

        tasks = [_Task(take) for _ in range(min(self._num_threads, len(items)) - 1)]
        helpers = [task for task in tasks if self._takes(task)]
        try:
            take()
        finally:
            joined = [helper.future for helper in helpers if not helper.was_taken_back()]
            wait(joined)
        for future in joined:
            future.result()
        return [results[i] for i in range(len(items))]

    def _takes(self, task: _Task[T]) -> bool:
        """Return whether a thread has begun the work, or will."""
        pool = self._pool
        if pool is None or not self._process.is_here:
            return False
        try:
            pool.submit(task.run)
        except RuntimeError:
            # Closed concurrently; or no thread could be started, although the work is queued.
            return not task.was_taken_back()
        return True
