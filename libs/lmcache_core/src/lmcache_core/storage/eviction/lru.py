"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction.base import EvictionPolicy


class LRUPolicy(EvictionPolicy):
    """Evicts the chunk whose last access is the oldest. Every call is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        assert key not in self._order, "a key is inserted once"
        self._order[key] = None

    @override
    def on_access(self, key: ChunkKey) -> None:
        self._order.move_to_end(key)

    @override
    def on_remove(self, key: ChunkKey) -> None:
        del self._order[key]

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield the least recently used first; a declined key becomes the most recently used."""
        for _ in range(len(self._order)):
            key = next(iter(self._order))
            yield key
            if key in self._order:
                self._order.move_to_end(key)

    @override
    def coldest_first(self) -> list[ChunkKey]:
        return list(self._order)

    def __len__(self) -> int:
        return len(self._order)
