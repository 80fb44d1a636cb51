"""Records that are there and of no use here."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from lmcache_core.keys import ChunkKey

MAX_KEYS_IN_THE_WAY = 4096
NOTED_S = 300.0
"""Then a key is forgotten: another writer may have put it right, and who is told that a chunk is
not there does not ask for it.
"""


class InTheWay:
    """Remembers which chunks were not served though a record of them is there; the oldest are
    forgotten first.

    Whoever asks then computes the chunk anew and stores it: it must not be told that the chunk is
    there already, and, where what is there is to give place (a lossy record where lossless is
    asked, a damaged one), that must go first. On one event loop.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: OrderedDict[ChunkKey, float] = OrderedDict()

    def __contains__(self, key: ChunkKey) -> bool:
        self._forget_old()
        return key in self._keys

    def __len__(self) -> int:
        self._forget_old()
        return len(self._keys)

    def note(self, key: ChunkKey) -> None:
        """Such a record of that chunk has just been seen."""
        self._keys[key] = self._clock()
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_KEYS_IN_THE_WAY:
            self._keys.popitem(last=False)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are gone, or can be served."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()

    def _forget_old(self) -> None:
        if not self._keys:
            return
        oldest = self._clock() - NOTED_S
        while self._keys and next(iter(self._keys.values())) <= oldest:
            self._keys.popitem(last=False)
