"""Reads that are on their way up: nobody reads the same chunk twice at once, and what is removed
meanwhile does not come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lmcache_core.keys import ChunkKey

IsUnwanted = Callable[[ChunkKey], bool]


class Lift:
    """Chunks that one task is reading from slower tiers.

    Args:
        keys: Their names.
    """

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        self.keys = frozenset(keys)
        self.unwanted: set[ChunkKey] = set()
        self.done = asyncio.Event()

    def forget(self, is_unwanted: IsUnwanted) -> None:
        """These chunks are being removed: the lift must not keep them."""
        self.unwanted.update(key for key in self.keys if is_unwanted(key))


class Lifts:
    """The lifts of one stack, and the removals that they must not undo. On its event loop only."""

    def __init__(self) -> None:
        self._active: list[Lift] = []
        self._removals: dict[object, IsUnwanted] = {}

    def begin(self, keys: Sequence[ChunkKey]) -> Lift:
        """A task starts to read these chunks; it ends with `end`."""
        lift = Lift(keys)
        for is_unwanted in self._removals.values():
            lift.forget(is_unwanted)
        self._active.append(lift)
        return lift

    def end(self, lift: Lift) -> None:
        """What that task could bring is where it belongs."""
        self._active.remove(lift)
        lift.done.set()

    @contextmanager
    def removing(self, is_unwanted: IsUnwanted) -> Iterator[None]:
        """While inside, these chunks are being removed from one tier after the other.

        Lifts that are on their way or begin meanwhile may still find them in a tier whose turn is
        to come. They do not keep them, also when they end later: who has seen that a chunk is gone
        must not see it again.
        """
        for lift in self._active:
            lift.forget(is_unwanted)
        removal = object()
        self._removals[removal] = is_unwanted
        try:
            yield
        finally:
            del self._removals[removal]

    async def wait_for_others(self, keys: Sequence[ChunkKey], timeout_s: float) -> bool:
        """Wait until nobody is reading these chunks any more, at most `timeout_s` seconds.

        Returns:
            Whether there was anybody to wait for.
        """
        wanted = set(keys)
        others = [lift for lift in self._active if not wanted.isdisjoint(lift.keys)]
        if not others:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                for lift in others:
                    await lift.done.wait()
        except TimeoutError:
            pass
        return True
