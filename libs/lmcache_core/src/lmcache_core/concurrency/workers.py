"""A few threads for work on bytes that releases the GIL: digests."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

MAX_THREADS = 4
"""More do not help: two or three digests at once read memory as fast as it can be read."""

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Runs functions in threads while it is open, and in the caller's thread while it is not.

    Args:
        name: Prefix of the threads' names.
        num_threads: By default one for each processor that this process may use, at most `MAX_THREADS`.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._name = name
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Allow threads; they are started when first needed."""
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix=self._name)

    def close(self) -> None:
        """Let what runs end, and join the threads. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `work` soon; the caller waits for the future. What it raises without threads, it raises here."""
        pool = self._pool
        if pool is not None:
            try:
                return pool.submit(work, *args, **kwargs)
            except RuntimeError:
                pass  # closed in this moment
        done: Future[T] = Future()
        done.set_result(work(*args, **kwargs))
        return done
