"""What all tickets of a process may hold together, and how many lifts may run for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lmcache_core.record import Chunk

STAGED_SHARE = 2
"""What is staged may hold one part in this many of the host memory: the rest is for stores,
loads and lifts.
"""
MAX_LIFTS = 64


class StagingRoom:
    """Counts what is held; a chunk that several tickets hold counts once. Thread-safe.

    Args:
        max_bytes: Bound on the memory of all chunks held.
        max_lifts: Bound on lifts at once.
    """

    def __init__(self, max_bytes: int, max_lifts: int = MAX_LIFTS) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_holders: dict[int, int] = {}
        self._lifts = threading.Semaphore(max_lifts)
        self.used_bytes = 0

    @property
    def left_bytes(self) -> int:
        """What may still be held."""
        return max(0, self._max_bytes - self.used_bytes)

    def take(self, chunks: Sequence[Chunk], unit: int) -> int:
        """Count chunks as held, as many from the first as there is room for.

        Args:
            chunks: Their references belong to the caller, and stay for as long as they are counted
                here.
            unit: So many belong together, and are taken together.

        Returns:
            How many units were taken.
        """
        with self._lock:
            if self._add(chunks):
                return len(chunks) // unit
            for at in range(0, len(chunks), unit):
                if not self._add(chunks[at : at + unit]):
                    return at // unit
        return len(chunks) // unit

    def give(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The counterpart of `take`; which of the chunks nobody holds any more."""
        with self._lock:
            return self._forget(chunks)

    def begin_lift(self) -> bool:
        """Whether one more lift may run; it ends with `end_lift`."""
        return self._lifts.acquire(blocking=False)

    def end_lift(self) -> None:
        """A lift is over."""
        self._lifts.release()

    def _add(self, chunks: Sequence[Chunk]) -> bool:
        """All of them, or none."""
        num_holders = self._num_holders
        for chunk in chunks:
            name = id(chunk.memory)
            num_before = num_holders.get(name)
            if num_before is None:
                num_holders[name] = 1
                self.used_bytes += chunk.memory.metadata.phy_size
            else:
                num_holders[name] = num_before + 1
        if self.used_bytes <= self._max_bytes:
            return True
        self._forget(chunks)
        return False

    def _forget(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        num_holders = self._num_holders
        unheld = []
        for chunk in chunks:
            name = id(chunk.memory)
            num_left = num_holders[name] - 1
            if num_left:
                num_holders[name] = num_left
            else:
                del num_holders[name]
                self.used_bytes -= chunk.memory.metadata.phy_size
                unheld.append(chunk)
        return unheld
