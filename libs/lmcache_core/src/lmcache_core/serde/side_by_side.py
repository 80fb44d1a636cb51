"""Work on the parts of one buffer, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def side_by_side(pool: Executor, work: Callable[[S], T], parts: Iterable[S]) -> list[T]:
    """What `work` gives for each part, in their order.

    Nothing is left at work when this returns or raises: whoever owns the buffer may then give its
    memory to others. `Executor.map` lets go of those that still run when the first one fails.

    Args:
        pool: Where they are worked on.
        work: Called with each part, on any thread.
        parts: The parts.

    Raises:
        RuntimeError: The pool takes no more work.
        BaseException: What `work` raised for the first part for which it raised anything.
    """
    futures: list[Future[T]] = []
    try:
        futures += (pool.submit(work, part) for part in parts)
    finally:
        wait(futures)
    return [future.result() for future in futures]
