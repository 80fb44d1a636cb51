"""The one bridge between sync callers (engine, GPU connectors) and async internals (tiers,
transports).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lmcache_core.concurrency.started_pool import loop_pool
from lmcache_core.errors import UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """An event loop in a separate thread; `run` passes it a coroutine and waits for the result.

    The thread is a daemon, so a caller that forgets `close` does not block the interpreter's exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread, and those for `asyncio.to_thread`.

        Raises:
            UnavailableError: This process may not have that many more threads.
        """
        pool = loop_pool()
        loop = asyncio.new_event_loop()
        loop.set_default_executor(pool)
        thread = threading.Thread(target=loop.run_forever, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            loop.close()
            raise UnavailableError(f"{self._name}: {exc}; allow one more thread") from exc
        self._loop, self._thread = loop, thread

    def run(
        self,
        work: Coroutine[Any, Any, T],
        timeout_s: float,
        discard: Callable[[T], None] | None = None,
    ) -> T:
        """Run `work` on the loop and wait for it.

        Args:
            work: Coroutine to run.
            timeout_s: Longest wait.
            discard: Releases what a result owns; called if the result comes too late for the
            caller.

        Raises:
            UnavailableError: It did not end within `timeout_s` and has been cancelled, or the loop
                has been closed.
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

        self._schedule(start, work)
        try:
            return answer.result(timeout_s)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as exc:
            if not answer.cancel() and answer.exception() is None:
                return answer.result()  # it came at the last moment
            with contextlib.suppress(UnavailableError):
                self._schedule(lambda: [task.cancel() for task in tasks])
            raise UnavailableError(f"no result within {timeout_s:.3f} s") from exc

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop; the caller owns the future.

        Raises:
            UnavailableError: The loop has been closed.
        """
        try:
            if self._loop is not None:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            pass  # closed concurrently
        work.close()
        raise UnavailableError("the event loop is closed")

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop and join its thread, cancelling what still runs on it. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        loop.call_soon_threadsafe(_stop, loop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error(
                "event loop did not stop, leaving it: thread=%s waited_s=%g", self._name, timeout_s
            )
        else:
            loop.close()

    def _schedule(self, callback: Callable[[], object], *works: Coroutine[Any, Any, Any]) -> None:
        loop = self._loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(callback)
                return
        except RuntimeError:
            pass  # closed concurrently
        for work in works:
            work.close()
        raise UnavailableError("the event loop is closed")


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    done = asyncio.gather(*pending, return_exceptions=True)
    done.add_done_callback(lambda _: loop.stop())
