"""Reads from slower tiers in progress: no chunk is read twice at once, and what is removed
meanwhile does not come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lmcache_core.keys import ChunkKey

IsUnwanted = Callable[[ChunkKey], bool]


class InflightRead:
    """Chunks that one task is reading from slower tiers.

    Args:
        keys: Their names.

    Attributes:
        unwanted: Those of them that are being removed: the task must not keep them.
        done: Set when the read is over.
    """

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        self.keys = frozenset(keys)
        self.unwanted: set[ChunkKey] = set()
        self.done = asyncio.Event()

    def forget(self, is_unwanted: IsUnwanted) -> None:
        """Note which of the chunks are being removed."""
        self.unwanted.update(key for key in self.keys if is_unwanted(key))


class InflightReads:
    """The reads of one stack, and the removals that they must not undo. On its event loop only."""

    def __init__(self) -> None:
        self._active: list[InflightRead] = []
        self._removals: dict[object, IsUnwanted] = {}

    @contextmanager
    def reading(self, keys: Sequence[ChunkKey]) -> Iterator[InflightRead]:
        """Announce a read of these chunks for as long as the context lasts."""
        read = InflightRead(keys)
        for is_unwanted in self._removals.values():
            read.forget(is_unwanted)
        self._active.append(read)
        try:
            yield read
        finally:
            self._active.remove(read)
            read.done.set()

    @contextmanager
    def removing(self, is_unwanted: IsUnwanted) -> Iterator[None]:
        """Announce that these chunks are being removed from one tier after the other.

        Reads in progress, or begun meanwhile, may still find them in a tier whose turn is to come.
        They do not keep them, even when they end later: a caller that saw a chunk gone must not
        see it again.
        """
        for read in self._active:
            read.forget(is_unwanted)
        removal = object()
        self._removals[removal] = is_unwanted
        try:
            yield
        finally:
            del self._removals[removal]

    async def wait_for_others(self, keys: Sequence[ChunkKey], timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until no other task is reading these chunks; False if
        none was.
        """
        wanted = set(keys)
        others = [read for read in self._active if not wanted.isdisjoint(read.keys)]
        if not others:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                for read in others:
                    await read.done.wait()
        except TimeoutError:
            pass
        return True
