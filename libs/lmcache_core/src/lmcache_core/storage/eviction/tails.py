"""Tails go first, in any policy: they are needed for a moment, by one reader."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction.base import EvictionPolicy


class TailsFirst(EvictionPolicy):
    """Orders tails by age, before everything that another policy orders.

    Args:
        rest: The policy of all other chunks; it never sees a tail.

    Attributes:
        tail_bytes: How much of the capacity tails take.
    """

    def __init__(self, rest: EvictionPolicy) -> None:
        self._rest = rest
        self._tails: OrderedDict[ChunkKey, int] = OrderedDict()
        self.tail_bytes = 0

    @property
    def oldest_tail(self) -> ChunkKey | None:
        """Return the tail that goes first; None if there is none."""
        return next(iter(self._tails), None)

    def like(self) -> TailsFirst:
        """Return an empty policy of the same kind."""
        return TailsFirst(type(self._rest)())

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        if key.lane.is_tail:
            self._tails[key] = num_bytes
            self.tail_bytes += num_bytes
        else:
            self._rest.on_insert(key, num_bytes)

    @override
    def on_access(self, key: ChunkKey) -> None:
        if not key.lane.is_tail:
            self._rest.on_access(key)

    @override
    def on_remove(self, key: ChunkKey) -> None:
        if key.lane.is_tail:
            self.tail_bytes -= self._tails.pop(key)
        else:
            self._rest.on_remove(key)

    @override
    def victims(self) -> Iterator[ChunkKey]:
        for _ in range(len(self._tails)):
            key = next(iter(self._tails))
            yield key
            if key in self._tails:  # it is in use
                self._tails.move_to_end(key)
        yield from self._rest.victims()

    @override
    def coldest_first(self) -> list[ChunkKey]:
        return [*self._tails, *self._rest.coldest_first()]

    def __len__(self) -> int:
        return len(self._tails) + len(self._rest)
