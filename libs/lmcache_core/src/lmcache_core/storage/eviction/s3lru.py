"""S3-LRU: what is new is on probation in a small queue, what was read again is kept in the order of
its last access.

Source: the queues are those of S3-FIFO (see `s3fifo.py`); docs/adr/0007-eviction-default.md says
    why they are kept in another way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction.base import EvictionPolicy
from lmcache_core.storage.eviction.s3fifo import GhostQueue

SMALL_SHARE = 0.2
"""Part of the held bytes that chunks on probation may take. Tuned: see
`tests/bench/eviction.py`.
"""


class S3LRUPolicy(EvictionPolicy):
    """S3-FIFO with a main queue in the order of the last access, for chains of chunks. Every call
    is O(1).

    It takes from S3-FIFO the small queue on probation, first in, first out, which goes first as
    soon as it has more than its share, so that what is used once (the question behind a document)
    cannot push out what is used again; and the ghost queue: a key that probation gave up, and that
    comes back, starts in the main queue.

    Where it differs, measured in `tests/bench/eviction.py`: the main queue is in the order of the
    last access instead of FIFO with a two-bit count, and one read promotes, at once, instead of two
    at the end of the small queue. Both keep the head of a chain behind its tail, and a conversation
    that has ended leaves the cache sooner. A lock is held here anyway, so that the paper's reason
    for counting instead of moving does not apply. The small queue takes 20 % instead of 10 %: the
    next turn of a conversation takes its time.

    The share is one of what is held now, not of a capacity: a tier's memory is shared with
    reservations, and nothing is ever given up before it is full.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, int] = OrderedDict()
        self._main: OrderedDict[ChunkKey, int] = OrderedDict()
        self._ghosts = GhostQueue()
        self._small_bytes = 0
        self._main_bytes = 0
        self._offered: ChunkKey | None = None

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        assert key not in self._small, "a key is inserted once"
        assert key not in self._main, "a key is inserted once"
        if self._ghosts.take(key):
            self._main[key] = num_bytes
            self._main_bytes += num_bytes
        else:
            self._small[key] = num_bytes
            self._small_bytes += num_bytes

    @override
    def on_access(self, key: ChunkKey) -> None:
        if key in self._main:
            self._main.move_to_end(key)
        else:
            num_bytes = self._small.pop(key)
            self._small_bytes -= num_bytes
            self._main[key] = num_bytes
            self._main_bytes += num_bytes

    @override
    def on_remove(self, key: ChunkKey) -> None:
        num_bytes = self._small.pop(key, None)
        if num_bytes is None:
            self._main_bytes -= self._main.pop(key)
            return
        self._small_bytes -= num_bytes
        if key == self._offered:
            self._ghosts.add(key, num_bytes, self._small_bytes + self._main_bytes)

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield keys in the order in which to give them up; a declined key counts as read."""
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

    @override
    def coldest_first(self) -> list[ChunkKey]:
        return [*self._small, *self._main]

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
