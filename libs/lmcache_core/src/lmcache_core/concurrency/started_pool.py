"""Thread pools whose threads run from the beginning.

A pool that starts threads on demand fails in the middle of its work when its process, or its
container, may have no more of them. `submit` then raises an error and runs the work anyway, on
memory that its caller has released.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from lmcache_core.errors import UnavailableError

NUM_LOOP_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""As many as asyncio would start on demand."""


def started_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads all run.

    Args:
        num_threads: Number of threads.
        name: Prefix of their names.

    Raises:
        UnavailableError: This process may not have that many more threads.
    """
    pool = ThreadPoolExecutor(num_threads, name)
    all_run = threading.Barrier(num_threads + 1)
    try:
        for _ in range(num_threads):
            pool.submit(all_run.wait)
    except RuntimeError as exc:
        all_run.abort()
        pool.shutdown(cancel_futures=True)
        raise UnavailableError(
            f"{name}: {exc}; allow this process {num_threads} more threads"
        ) from exc
    all_run.wait()
    return pool


def loop_pool() -> ThreadPoolExecutor:
    """Return a pool for `asyncio.to_thread`: the default executor of an event loop."""
    return started_pool(NUM_LOOP_THREADS, "asyncio")
