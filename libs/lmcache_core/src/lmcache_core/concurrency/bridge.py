"""The one bridge between sync callers (engine, GPU connectors) and async internals (tiers, transports)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from lmcache_core.errors import UnavailableError

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own; `run` hands it a coroutine and waits for the result.

    The thread is a daemon, so a caller that forgets `close` does not hang the interpreter's exit.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._started = False

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._started = True

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `work` on the loop and wait for it.

        Raises:
            UnavailableError: It did not end within `timeout_s`; it has been cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as exc:
            future.cancel()
            raise UnavailableError(f"no result within {timeout_s:.3f} s") from exc

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop; the caller owns the future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop and join its thread. What still runs on the loop is cancelled."""
        if not self._started:
            self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()

    def _stop(self) -> None:
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        done = asyncio.gather(*pending, return_exceptions=True)
        done.add_done_callback(lambda _: self._loop.stop())
