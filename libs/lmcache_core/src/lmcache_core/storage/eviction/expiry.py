"""How long chunks are served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from lmcache_core.keys import ChunkKey

Clock = Callable[[], float]
"""Seconds since the epoch; a chunk's age must survive a restart."""


class Expiry:
    """When each chunk of a tier ends. Every call is O(1), amortised. Not thread-safe: its tier
    locks.

    All chunks live equally long, so that they end in the order in which they were stored. A chunk
    that comes from another tier brings its age with it and may end before those in front of it: it
    is never served too long, but found by `past` only after them. A chunk that was stored while the
    clock was ahead counts as stored when it is next looked at.

    Args:
        ttl_s: How long a chunk is served after it was stored, seconds.
        clock: Tells the time.
    """

    def __init__(self, ttl_s: float, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._ends: OrderedDict[ChunkKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, key: ChunkKey, stored_at: float | None) -> None:
        """A chunk is held.

        Args:
            key: Its name, which is not known yet.
            stored_at: When it was stored; None, or a time to come (a clock was set back), means
                now.
        """
        assert key not in self._ends, "a key is added once"
        now = self._clock()
        self._ends[key] = (now if stored_at is None else min(stored_at, now)) + self._ttl_s

    def remove(self, key: ChunkKey) -> None:
        """That chunk is held no longer."""
        del self._ends[key]

    def is_past(self, key: ChunkKey) -> bool:
        """Whether a held chunk is not to be served any more."""
        now = self._clock()
        return self._end(key, now) <= now

    def past(self, limit: int) -> list[ChunkKey]:
        """Held chunks that are not to be served any more, at most `limit` of them, oldest first."""
        found: list[ChunkKey] = []
        now = self._clock()
        for key in self._ends:
            if self._end(key, now) > now or len(found) == limit:
                break
            found.append(key)
        return found

    def _end(self, key: ChunkKey, now: float) -> float:
        """When a held chunk ends; never further off than for one that is stored now."""
        end = self._ends[key] = min(self._ends[key], now + self._ttl_s)
        return end
