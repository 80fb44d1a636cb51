"""The keys that probation has given up, remembered for as long as their chunks might have been
of use.
"""

from __future__ import annotations

from collections import OrderedDict

from lmcache_core.keys import ChunkKey


class GhostQueue:
    """Keys without chunks, first in, first out, bounded by what the chunks took. Every call is
    O(1), amortised.

    Source: the ghost queue of S3-FIFO (see `s3fifo.py`).
    """

    def __init__(self) -> None:
        self._sizes: OrderedDict[ChunkKey, int] = OrderedDict()
        self._num_bytes = 0

    def add(self, key: ChunkKey, num_bytes: int, limit_bytes: float) -> None:
        """Remember a key, and forget the oldest ones beyond the limit.

        Args:
            key: One that is not remembered.
            num_bytes: What its chunk took; one of no bytes counts as one byte, so that the limit
                bounds those too.
            limit_bytes: What the chunks of all remembered keys may have taken.
        """
        assert key not in self._sizes, "a key is given up once"
        self._sizes[key] = max(num_bytes, 1)
        self._num_bytes += self._sizes[key]
        while self._num_bytes > limit_bytes:
            self._num_bytes -= self._sizes.popitem(last=False)[1]

    def take(self, key: ChunkKey) -> bool:
        """Whether a key is remembered; from now on it is not."""
        num_bytes = self._sizes.pop(key, None)
        self._num_bytes -= num_bytes or 0
        return num_bytes is not None

    @property
    def num_bytes(self) -> int:
        """What the chunks of all remembered keys took."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._sizes)
