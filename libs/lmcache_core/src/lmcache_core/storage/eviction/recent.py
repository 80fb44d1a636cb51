"""The keys given up last, and why: what tells "evicted" and "expired" from "never stored"."""

from __future__ import annotations

from collections import OrderedDict

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Miss, MissReason

MAX_RECENT_EVICTIONS = 16384


class RecentEvictions:
    """A bounded set of keys, each with the reason why it went, the oldest forgotten first. Not
    thread-safe: its tier locks.
    """

    def __init__(self) -> None:
        self._reasons: OrderedDict[ChunkKey, MissReason] = OrderedDict()

    def add(self, key: ChunkKey, reason: MissReason = MissReason.EVICTED) -> None:
        """That chunk has just gone."""
        self._reasons[key] = reason
        if len(self._reasons) > MAX_RECENT_EVICTIONS:
            self._reasons.popitem(last=False)

    def discard(self, key: ChunkKey) -> None:
        """That chunk is held again."""
        self._reasons.pop(key, None)

    def miss(self, key: ChunkKey) -> Miss:
        """The miss to report for a chunk that is not held: evicted or expired, as far as
        remembered, or never stored.
        """
        return Miss(self._reasons.get(key, MissReason.NEVER_STORED))
