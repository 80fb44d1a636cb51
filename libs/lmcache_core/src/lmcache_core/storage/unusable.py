"""Records that exist but that this reader cannot use."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from lmcache_core.keys import ChunkKey

MAX_UNUSABLE_KEYS = 4096
NOTED_S = 300.0
"""Time after which a key is forgotten: another writer may have replaced the record, and a reader
does not ask for a chunk that is reported as absent.
"""


class UnusableRecords:
    """Remembers which chunks were not served although a record exists; the oldest are forgotten
    first.

    The reader then computes the chunk and stores it. So the chunk must be reported as absent, and a
    record that is to be replaced (lossy where lossless is required, or damaged) must be removed
    first. For one event loop.

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
        """Remember that a record of that chunk is unusable."""
        self._keys[key] = self._clock()
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_UNUSABLE_KEYS:
            self._keys.popitem(last=False)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Forget chunks that are gone or can be served."""
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
