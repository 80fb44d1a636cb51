"""Queue of the chunks that still have to be handed over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush

from lmcache_core.keys import ChunkKey

MAX_BATCH_CHUNKS = 16
MAX_BATCH_BYTES = 16 << 20
"""Of the chunks that one taker is given at once; a larger chunk goes alone."""


class TakerBatch:
    """Chunks that are with one taker.

    Args:
        keys: Their names.
    """

    def __init__(self, keys: Iterable[ChunkKey]) -> None:
        self._open = dict.fromkeys(keys)
        self.refused: set[ChunkKey] = set()
        self.num_settled = 0

    @property
    def keys(self) -> list[ChunkKey]:
        """Chunks not dealt with yet, the hottest first."""
        return list(self._open)

    def settle(self, key: ChunkKey) -> None:
        """Count a chunk as dealt with."""
        del self._open[key]
        self.num_settled += 1

    def refuse(self, key: ChunkKey) -> None:
        """Note that the taker does not take a chunk."""
        self.refused.add(key)


class WaitingChunks:
    """A queue: what is taken out and not settled returns to its place. On one event loop.

    Args:
        chunks: Names and sizes in bytes, the hottest first.
    """

    def __init__(self, chunks: Sequence[tuple[ChunkKey, int]]) -> None:
        self._chunks = tuple(chunks)
        self._places = {key: place for place, (key, _) in enumerate(chunks)}
        self._heap = list(range(len(chunks)))  # of places; sorted, which is a heap
        self._refused_by: dict[ChunkKey, set[str]] = {}

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def num_refused(self) -> int:
        """Waiting chunks that at least one taker has refused."""
        return sum(self._chunks[place][0] in self._refused_by for place in self._heap)

    @contextmanager
    def batch(self, taker: str) -> Iterator[TakerBatch]:
        """Take the next chunks that this taker has not refused; empty when there are none. Those
        not settled inside wait again.
        """
        batch = TakerBatch(self._take(taker))
        try:
            yield batch
        finally:
            for key in batch.refused:
                self._refused_by.setdefault(key, set()).add(taker)
            self._put_back(self._places[key] for key in batch.keys)

    def _take(self, taker: str) -> list[ChunkKey]:
        taken: list[ChunkKey] = []
        passed: list[int] = []
        num_bytes = 0
        while self._heap and len(taken) < MAX_BATCH_CHUNKS:
            key, size = self._chunks[self._heap[0]]
            if taker in self._refused_by.get(key, ()):
                passed.append(heappop(self._heap))
                continue
            num_bytes += size
            if taken and num_bytes > MAX_BATCH_BYTES:
                break
            heappop(self._heap)
            taken.append(key)
        self._put_back(passed)
        return taken

    def _put_back(self, places: Iterable[int]) -> None:
        for place in places:
            heappush(self._heap, place)
