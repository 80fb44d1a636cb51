"""Long work in steps, so that an event loop can do its other work in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields at safe preemption points. State read before a yield may be stale after
it; closing the generator at a yield releases everything that it holds.
"""


def run_blocking(steps: Steps[T]) -> T:
    """Run all steps here and now."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


async def run_cooperatively(steps: Steps[T], lock: threading.Lock) -> T:
    """Run the steps on this event loop, each under the lock, with other work in between. Cancelled
    between two steps, the generator is closed.
    """
    try:
        while True:
            with lock:
                try:
                    next(steps)
                except StopIteration as done:
                    result: T = done.value
                    return result
            await asyncio.sleep(0)
    finally:
        with lock:
            steps.close()
