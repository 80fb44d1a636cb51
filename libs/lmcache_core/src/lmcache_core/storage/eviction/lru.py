"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction.base import EvictionPolicy


class LRUPolicy(EvictionPolicy):
    """Gives up the chunk whose last access is the oldest. Every call is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def fresh(self) -> LRUPolicy:
        """See `EvictionPolicy.fresh`."""
        return LRUPolicy()

    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        """See `EvictionPolicy.on_insert`."""
        assert key not in self._order, "a key is inserted once"
        self._order[key] = None

    def on_access(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.on_access`."""
        self._order.move_to_end(key)

    def on_remove(self, key: ChunkKey) -> None:
        """See `EvictionPolicy.on_remove`."""
        del self._order[key]

    def victims(self) -> Iterator[ChunkKey]:
        """See `EvictionPolicy.victims`; a declined key becomes the most recently used one."""
        for _ in range(len(self._order)):
            key = next(iter(self._order))
            yield key
            if key in self._order:
                self._order.move_to_end(key)

    def coldest_first(self) -> list[ChunkKey]:
        """See `EvictionPolicy.coldest_first`."""
        return list(self._order)

    def __len__(self) -> int:
        return len(self._order)
