"""The keys evicted last: what tells "evicted" from "never stored"."""

from __future__ import annotations

from collections import OrderedDict

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Miss, MissReason

MAX_RECENT_EVICTIONS = 16384


class RecentEvictions:
    """A bounded set of keys, the oldest forgotten first. Not thread-safe: its tier locks."""

    def __init__(self) -> None:
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()

    def add(self, key: ChunkKey) -> None:
        """That chunk has just been evicted."""
        self._keys[key] = None
        if len(self._keys) > MAX_RECENT_EVICTIONS:
            self._keys.popitem(last=False)

    def discard(self, key: ChunkKey) -> None:
        """That chunk is held again."""
        self._keys.pop(key, None)

    def miss(self, key: ChunkKey) -> Miss:
        """The miss to report for a chunk that is not held: evicted, as far as remembered, or never stored."""
        return Miss(MissReason.EVICTED if key in self._keys else MissReason.NEVER_STORED)
