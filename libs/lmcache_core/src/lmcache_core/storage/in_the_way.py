"""Lossy records that stand where a lossless one is wanted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from lmcache_core.keys import ChunkKey

MAX_KEYS_IN_THE_WAY = 4096


class InTheWay:
    """Remembers which chunks were not served because only a lossy record of them is there; the oldest are forgotten first.

    Whoever asks then computes the chunk anew and stores it: it must not be told that the chunk is there already, and the lossy record
    must go first. On one event loop.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, key: ChunkKey) -> None:
        """A lossy record of that chunk has just been seen."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_KEYS_IN_THE_WAY:
            self._keys.popitem(last=False)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are gone, or are there losslessly."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()
