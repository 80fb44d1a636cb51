"""Long work in steps: an event loop that does it has its other work done in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields where others may have their turn. What it found before may be otherwise then;
closed there, it leaves nothing behind.
"""


def at_once(steps: Steps[T]) -> T:
    """Do all of it here and now."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


async def in_turns(steps: Steps[T], lock: threading.Lock) -> T:
    """Do it on this event loop, step by step, each under the lock. Cancelled between two of
    them, the work is closed.
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
