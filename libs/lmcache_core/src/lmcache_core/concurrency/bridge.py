"""The one bridge between sync callers (engine, GPU connectors) and async internals (tiers,
transports).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lmcache_core.concurrency.started_pool import OwnThread, loop_pool
from lmcache_core.errors import UnavailableError
from lmcache_core.forks import (
    OPEN_IN_EACH_PROCESS,
    ProcessMark,
    enter_children,
    never_finalize,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """An event loop in a separate thread; `run` passes it a coroutine and waits for the result.

    The thread is a daemon, so a caller that forgets `close` does not block the interpreter's exit.
    In a forked child, which has no such thread, every call fails at once, and `close` does nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._process = ProcessMark()
        self._unanswered: set[concurrent.futures.Future[Any]] = set()

    @property
    def is_inherited(self) -> bool:
        """Return whether it was opened in a process that has forked this one."""
        return self._thread is not None and not self._process.is_here

    def open(self) -> None:
        """Start the thread, and those for `asyncio.to_thread`.

        Raises:
            UnavailableError: This process may not have that many more threads.
        """
        pool = loop_pool()
        loop = asyncio.new_event_loop()
        loop.set_default_executor(pool)
        unanswered: set[concurrent.futures.Future[Any]] = set()
        is_over = asyncio.Event()
        thread = OwnThread(self._name, lambda: _run(loop, is_over, unanswered))
        try:
            thread.start()
        except RuntimeError as exc:
            loop.close()
            raise UnavailableError(f"{self._name}: {exc}; allow one more thread") from exc
        self._loop, self._thread, self._process = loop, thread, ProcessMark()
        self._is_over, self._unanswered = is_over, unanswered
        enter_children(self)

    def run(
        self,
        work: Coroutine[Any, Any, T],
        timeout_s: float,
        discard: Callable[[T], None] | None = None,
    ) -> T:
        """Run `work` on the loop and wait for it.

        Args:
            discard: Releases what a result owns; called if the result comes too late for the
                caller.

        Raises:
            UnavailableError: It did not end within `timeout_s` and has been cancelled, or the loop
                is closed or inherited.
        """
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(asyncio.get_running_loop().create_task(work))
            tasks[0].add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            # Exactly one side gets the result: the caller, or `discard` if the caller has stopped
            # waiting.
            if task.cancelled():
                answer.cancel()
            elif not answer.set_running_or_notify_cancel():
                if task.exception() is None and discard is not None:
                    discard(task.result())
            elif (failure := task.exception()) is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(task.result())

        loop, unanswered = self._loop, self._unanswered
        unanswered.add(answer)
        try:
            self._schedule(start, work)
            return answer.result(timeout_s)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as exc:
            if not answer.cancel() and answer.exception() is None:
                return answer.result()  # it came at the last moment
            try:
                self._schedule(lambda: [task.cancel() for task in tasks])
            except UnavailableError:
                if not tasks and loop is not None and loop.is_closed():
                    work.close()  # it has never begun
            raise UnavailableError(f"no result within {timeout_s:.3f} s") from exc
        finally:
            unanswered.discard(answer)

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop; the caller owns the future.

        Raises:
            UnavailableError: The loop is closed or inherited.
        """
        loop = self._loop
        try:
            if loop is not None and self._process.is_here:
                return asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:
            pass  # closed concurrently
        work.close()
        raise self._refusal()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop and join its thread, cancelling what still runs on it. Idempotent; every
        caller waits, except the loop's own thread.
        """
        loop, thread = self._loop, self._thread
        self._loop = None
        if thread is None or not self._process.is_here:
            return
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed concurrently
                loop.call_soon_threadsafe(self._is_over.set)
        if thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            logger.error(
                "event loop did not stop, leaving it: thread=%s waited_s=%g", self._name, timeout_s
            )
        else:
            self._thread = None

    def enter_child(self) -> None:
        """Leave the loop, and everything that it waits for, to the parent."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        never_finalize([loop, *asyncio.all_tasks(loop)])
        _let_go_of_descriptors(loop)

    def _schedule(self, callback: Callable[[], object], *works: Coroutine[Any, Any, Any]) -> None:
        loop = self._loop
        try:
            if loop is not None and self._process.is_here:
                loop.call_soon_threadsafe(callback)
                return
        except RuntimeError:
            pass  # closed concurrently
        for work in works:
            work.close()
        raise self._refusal()

    def _refusal(self) -> UnavailableError:
        return UnavailableError(
            OPEN_IN_EACH_PROCESS if self.is_inherited else "the event loop is closed"
        )


def _run(
    loop: asyncio.AbstractEventLoop,
    is_over: asyncio.Event,
    unanswered: set[concurrent.futures.Future[Any]],
) -> None:
    """Run a loop until it is over, and until all tasks, which are cancelled then, have ended."""

    async def serve() -> None:
        await is_over.wait()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_until_complete(serve())
    finally:
        loop.close()
        # Calls that were scheduled too late to begin. Later ones find the loop closed.
        for answer in list(unanswered):
            answer.cancel()


def _let_go_of_descriptors(loop: asyncio.AbstractEventLoop) -> None:
    """Replace a loop's connections by `/dev/null` in this process: with copies of them the parent
    could end none, and changes of the shared `epoll` would be changes of the parent's.
    """
    selector = getattr(loop, "_selector", None)  # uvloop has none
    if selector is None:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in [*(key.fd for key in selector.get_map().values()), selector.fileno()]:
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
