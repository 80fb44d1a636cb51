"""Reads that are on their way up: nobody reads the same chunk twice at once, and what is removed meanwhile does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lmcache_core.keys import ChunkKey


class Lift:
    """Chunks that one task is reading from slower tiers.

    Args:
        keys: Their names.
    """

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        self.keys = frozenset(keys)
        self.unwanted: set[ChunkKey] = set()
        self.done = asyncio.Event()


class Lifts:
    """The lifts of one stack. On its event loop only."""

    def __init__(self) -> None:
        self._active: list[Lift] = []

    def begin(self, keys: Sequence[ChunkKey]) -> Lift:
        """A task starts to read these chunks; it ends with `end`."""
        lift = Lift(keys)
        self._active.append(lift)
        return lift

    def end(self, lift: Lift) -> None:
        """What that task could bring is where it belongs."""
        self._active.remove(lift)
        lift.done.set()

    def forget(self, is_unwanted: Callable[[ChunkKey], bool]) -> None:
        """These chunks are being removed: lifts on their way must not keep them."""
        for lift in self._active:
            lift.unwanted.update(key for key in lift.keys if is_unwanted(key))

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
