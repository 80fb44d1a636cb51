"""S3-FIFO as published: a small probationary queue, a main queue, and a ghost queue of keys evicted
from probation.

Source: Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023,
    Algorithm 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction.base import EvictionPolicy


class GhostQueue:
    """Keys without chunks, first in, first out, bounded by the total size of their chunks. Every
    call is O(1), amortised.

    Attributes:
        num_bytes: Total size of the chunks of all remembered keys.
    """

    def __init__(self) -> None:
        self._sizes: OrderedDict[ChunkKey, int] = OrderedDict()
        self.num_bytes = 0

    def add(self, key: ChunkKey, num_bytes: int, limit_bytes: float) -> None:
        """Remember a key, and forget the oldest ones beyond the limit.

        Args:
            key: A key that is not remembered yet.
            num_bytes: Size of its chunk; 0 counts as one byte, so that the limit bounds these, too.
            limit_bytes: Bound on the total size of the chunks of all remembered keys.
        """
        assert key not in self._sizes, "a key is evicted once"
        self._sizes[key] = max(num_bytes, 1)
        self.num_bytes += self._sizes[key]
        while self.num_bytes > limit_bytes:
            self.num_bytes -= self._sizes.popitem(last=False)[1]

    def take(self, key: ChunkKey) -> bool:
        """Forget a key; return whether it was remembered."""
        num_bytes = self._sizes.pop(key, None)
        self.num_bytes -= num_bytes or 0
        return num_bytes is not None

    def __len__(self) -> int:
        return len(self._sizes)


SMALL_PERCENT = 10
"""The share of the held bytes from which on chunks on probation are evicted first."""
MAX_READS = 3
"""Largest value of the two-bit counter."""
PROMOTED_ABOVE = 1
"""Reads on probation that are too few to stay."""


@dataclass(slots=True)
class _Held:
    """A known chunk.

    Attributes:
        num_reads: Reads since it entered its queue, less the times that they saved it from
            eviction; at most `MAX_READS`.
    """

    num_bytes: int
    num_reads: int = 0


class S3FIFOPolicy(EvictionPolicy):
    """S3-FIFO. Every call is O(1), `victims` amortised over the reads reported.

    A new chunk starts on probation in the small queue. A read only increments its counter. When
    room is needed and the small queue exceeds its share, its oldest chunk moves to the main queue
    if it was read more than once, and is evicted if not; its key is remembered, and if it returns,
    it starts in the main queue. Otherwise the oldest chunk of the main queue is evicted, except
    that one that was read goes back to the end with its counter decremented.

    Sizes are in bytes because chunks differ: the share, and the ghost queue, which remembers as
    much as the main queue holds. Both are relative to what is held now, not to a capacity: a tier's
    memory is shared with reservations, and nothing is evicted before it is full.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, _Held] = OrderedDict()
        self._main: OrderedDict[ChunkKey, _Held] = OrderedDict()
        # Joins the main queue at the next `victims`, so that no key is offered twice.
        self._declined: OrderedDict[ChunkKey, _Held] = OrderedDict()
        self._ghosts = GhostQueue()
        self._small_bytes = 0
        self._held_bytes = 0
        self._offered: ChunkKey | None = None

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        assert not any(key in queue for queue in self._queues()), "a key is inserted once"
        self._held_bytes += num_bytes
        if self._ghosts.take(key):
            self._main[key] = _Held(num_bytes)
        else:
            self._small[key] = _Held(num_bytes)
            self._small_bytes += num_bytes

    @override
    def on_access(self, key: ChunkKey) -> None:
        held = self._queue_of(key)[key]
        held.num_reads = min(held.num_reads + 1, MAX_READS)

    @override
    def on_remove(self, key: ChunkKey) -> None:
        was_on_probation = key in self._small
        held = self._take(key)
        self._held_bytes -= held.num_bytes
        if was_on_probation and key == self._offered:
            self._ghosts.add(key, held.num_bytes, self._held_bytes * (100 - SMALL_PERCENT) / 100)

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield keys in order of eviction; a declined key moves to the end of the main queue, as if
        it had been read often enough.
        """
        self._main.update(self._declined)
        self._declined.clear()
        while self._small or self._main:
            is_small_due = 100 * self._small_bytes >= SMALL_PERCENT * self._held_bytes
            is_from_small = bool(self._small) and (is_small_due or not self._main)
            key, held = next(iter((self._small if is_from_small else self._main).items()))
            if is_from_small and held.num_reads > PROMOTED_ABOVE:
                self._take(key)
                self._main[key] = _Held(held.num_bytes)
            elif not is_from_small and held.num_reads > 0:
                held.num_reads -= 1
                self._main.move_to_end(key)
            else:
                self._offered = key
                yield key
                if key in self._small or key in self._main:
                    self._declined[key] = _Held(self._take(key).num_bytes)

    @override
    def coldest_first(self) -> list[ChunkKey]:
        queues = (list(self._small.items()), [*self._main.items(), *self._declined.items()])
        return [
            key
            for queue in queues
            for key, _ in sorted(queue, key=lambda entry: entry[1].num_reads)
        ]

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues())

    def _queues(self) -> tuple[OrderedDict[ChunkKey, _Held], ...]:
        return self._small, self._main, self._declined

    def _queue_of(self, key: ChunkKey) -> OrderedDict[ChunkKey, _Held]:
        for queue in self._queues():
            if key in queue:
                return queue
        raise KeyError(key)

    def _take(self, key: ChunkKey) -> _Held:
        if key in self._small:
            self._small_bytes -= self._small[key].num_bytes
        return self._queue_of(key).pop(key)
