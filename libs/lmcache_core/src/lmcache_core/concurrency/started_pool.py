"""Thread pools whose threads run from the beginning, and until their owner closes them.

A pool that starts threads on demand fails in the middle of its work when its process, or its
container, may have no more of them. `submit` then raises an error and runs the work anyway, on
memory that its caller has released. And all pools of `concurrent.futures` stop when the interpreter
begins to end, before exit handlers run: such a handler could finish no write.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Generic, ParamSpec, TypeVar

from lmcache_core._typing import override
from lmcache_core.errors import UnavailableError
from lmcache_core.forks import ProcessMark

NUM_LOOP_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""As many as asyncio would start on demand."""
SHUTDOWN_WAIT_S: Final = 10.0
"""How long `shutdown` waits for work that has begun."""

P = ParamSpec("P")
T = TypeVar("T")


class OwnThread(threading.Thread):
    """A thread that works for the cache. It is a daemon: only its owner's `close` waits for it."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        super().__init__(target=work, name=name, daemon=True)


class StartedPool(ThreadPoolExecutor):
    """A pool of threads that all run; asyncio takes it as an event loop's executor.

    No method takes a lock, so that a signal handler or a finalizer may call any of them in the
    middle of another one. In a forked child it accepts no work. The threads end, too, when the pool
    is collected as garbage.

    Args:
        name: Prefix of their names.

    Attributes:
        ended: Done once all threads have ended.

    Raises:
        UnavailableError: This process may not have that many more threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, name)
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # cannot be cancelled from here on
        self._process = ProcessMark()
        self._is_closed = False
        self._queue: queue.SimpleQueue[ThreadWork[Any] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._queue.put, None).atexit = False  # type: ignore[misc]
        self._running: list[OwnThread] = []
        # The threads must not hold the pool.
        run = partial(_run, self._queue, self.ended, iter(range(num_threads, 0, -1)))
        try:
            for i in range(num_threads):
                thread = OwnThread(f"{name}_{i}", run)
                thread.start()
                self._running.append(thread)
        except RuntimeError as exc:
            self.shutdown()
            raise UnavailableError(
                f"{name}: {exc}; allow this process {num_threads} more threads"
            ) from exc

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` in a thread.

        Raises:
            RuntimeError: The pool is closed, or belongs to the process that forked this one.
        """
        work = ThreadWork(partial(fn, *args, **kwargs))
        if self._accepts_work():
            self._queue.put(work)
            # If it was closed concurrently, the threads may have ended before they came to this.
            if self._accepts_work() or not work.future.cancel():
                return work.future
        raise RuntimeError("cannot schedule new futures after shutdown")

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work, and let the threads end after what was accepted.

        Args:
            wait: Join them, for up to `SHUTDOWN_WAIT_S`.
            cancel_futures: Cancel what has not begun.
        """
        self._is_closed = True
        if not self._process.is_here:
            return
        if cancel_futures:
            with contextlib.suppress(queue.Empty):
                while True:
                    work = self._queue.get_nowait()
                    if work is not None:
                        work.future.cancel()
        self._queue.put(None)
        deadline = time.monotonic() + SHUTDOWN_WAIT_S
        for thread in self._running if wait else ():
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _accepts_work(self) -> bool:
        return not self._is_closed and self._process.is_here


class ThreadWork(Generic[T]):
    """A call for a thread.

    Attributes:
        future: Gets its result, or whatever it raises.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call = call

    def run(self) -> None:
        """Make the call, unless the future has been cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as exc:
            self.future.set_exception(exc)
            del self  # else the exception would hold its own future, and all arguments of the work
        else:
            self.future.set_result(result)


def _run(
    works: queue.SimpleQueue[ThreadWork[Any] | None], ended: Future[None], num_left: Iterator[int]
) -> None:
    while (work := works.get()) is not None:
        work.run()
        del work  # it would be held until there is more
    works.put(None)  # for the other threads
    if next(num_left) == 1:  # atomic
        ended.set_result(None)


def loop_pool() -> StartedPool:
    """Return a pool for `asyncio.to_thread`: the default executor of an event loop."""
    return StartedPool(NUM_LOOP_THREADS, "asyncio")
