"""Threads that interrupt each other as often as can be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

NUM_THREADS = 4
SWITCH_INTERVAL_S = 1e-6


def interleave(work: Callable[[int], None]) -> None:
    """Run `work(number)` in `NUM_THREADS` threads at once, so that a missing lock shows.

    Raises:
        Exception: What the first of them raised.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            list(threads.map(work, range(NUM_THREADS)))
    finally:
        sys.setswitchinterval(interval)
