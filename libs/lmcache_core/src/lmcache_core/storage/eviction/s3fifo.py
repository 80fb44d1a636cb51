"""S3-FIFO: a small queue on probation, a main queue, and the memory of what probation has given up.

Source: Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction.base import EvictionPolicy

SMALL_SHARE = 0.2
"""Part of the held bytes that chunks on probation may take. Tuned: see `tests/bench/eviction.py`."""


class S3FIFOPolicy(EvictionPolicy):
    """S3-FIFO for chains of chunks. Every call is O(1).

    A new chunk is on probation in the small queue, first in, first out. If it is read there, it moves to the main queue; if not, it goes
    as soon as the small queue has more than its share, so that what is used once (the question behind a document) cannot push out what is
    used again. Its key is remembered in the ghost queue: when it comes back, it starts in the main queue.

    Where it differs from the paper, measured in `tests/bench/eviction.py`: the main queue is in the order of the last access instead of
    FIFO with a two-bit count, and a read promotes at once instead of at the end of the small queue, because both keep the head of a chain
    behind its tail, and because a conversation that has ended leaves the cache sooner. A lock is held here anyway, so that the paper's
    reason for counting instead of moving does not apply. The small queue takes 20 % instead of 10 %: the next turn of a conversation
    takes its time.

    The share is one of what is held now, not of a capacity: a tier's memory is shared with reservations, and nothing is ever given up
    before it is full.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, int] = OrderedDict()
        self._main: OrderedDict[ChunkKey, int] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, int] = OrderedDict()
        self._small_bytes = 0
        self._main_bytes = 0
        self._ghost_bytes = 0
        self._offered: ChunkKey | None = None

    def fresh(self) -> S3FIFOPolicy:
        """See `EvictionPolicy.fresh`."""
        return S3FIFOPolicy()

    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        """See `EvictionPolicy.on_insert`."""
        assert key not in self._small, "a key is inserted once"
        assert key not in self._main, "a key is inserted once"
        ghost_bytes = self._ghosts.pop(key, None)
        if ghost_bytes is None:
            self._small[key] = num_bytes
            self._small_bytes += num_bytes
        else:
            self._ghost_bytes -= ghost_bytes
            self._main[key] = num_bytes
            self._main_bytes += num_bytes

    def on_access(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.on_access`."""
        if key in self._main:
            self._main.move_to_end(key)
        else:
            num_bytes = self._small.pop(key)
            self._small_bytes -= num_bytes
            self._main[key] = num_bytes
            self._main_bytes += num_bytes

    def on_remove(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.on_remove`."""
        num_bytes = self._small.pop(key, None)
        if num_bytes is None:
            self._main_bytes -= self._main.pop(key)
            return
        self._small_bytes -= num_bytes
        if key == self._offered:
            self._remember(key, num_bytes)

    def victims(self) -> Iterator[ChunkKey]:
        """See `EvictionPolicy.victims`; a declined key counts as read."""
        num_main = len(self._main)  # those not offered yet; what is declined goes behind them
        while self._small or num_main:
            is_small_over = self._small_bytes > SMALL_SHARE * (self._small_bytes + self._main_bytes)
            is_from_small = bool(self._small) and (is_small_over or not num_main)
            key = next(iter(self._small if is_from_small else self._main))
            num_main -= not is_from_small
            self._offered = key
            yield key
            if key in self._small or key in self._main:
                self.on_access(key)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _remember(self, key: ChunkKey, num_bytes: int) -> None:
        """A key that was given up on probation; the oldest are forgotten beyond as many bytes as are held."""
        charge = max(num_bytes, 1)
        self._ghosts[key] = charge
        self._ghost_bytes += charge
        while self._ghost_bytes > self._small_bytes + self._main_bytes:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]
