"""What all tickets of a process may hold together, and how many lifts may run for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lmcache_core.record import Chunk

STAGED_SHARE = 2
"""What is staged may hold one part in this many of the host memory: the rest is for stores, loads and lifts."""
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
            chunks: Their references belong to the caller, and stay for as long as they are counted here.
            unit: So many belong together, and are taken together.

        Returns:
            How many units were taken.
        """
        holders = self._num_holders
        with self._lock:
            used_bytes = self.used_bytes
            for at in range(0, len(chunks), unit):
                for chunk in chunks[at : at + unit]:
                    name = id(chunk.memory)
                    num_before = holders.get(name, 0)
                    holders[name] = num_before + 1
                    if not num_before:
                        used_bytes += chunk.memory.metadata.phy_size
                if used_bytes > self._max_bytes:
                    self._forget(chunks[at : at + unit])
                    return at // unit
                self.used_bytes = used_bytes
        return len(chunks) // unit

    def give(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The counterpart of `take`; which of the chunks nobody holds any more."""
        with self._lock:
            unheld = self._forget(chunks)
            self.used_bytes -= sum(chunk.memory.metadata.phy_size for chunk in unheld)
        return unheld

    def begin_lift(self) -> bool:
        """Whether one more lift may run; it ends with `end_lift`."""
        return self._lifts.acquire(blocking=False)

    def end_lift(self) -> None:
        """A lift is over."""
        self._lifts.release()

    def _forget(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        unheld = []
        for chunk in chunks:
            name = id(chunk.memory)
            num_left = self._num_holders[name] - 1
            if num_left:
                self._num_holders[name] = num_left
            else:
                del self._num_holders[name]
                unheld.append(chunk)
        return unheld
