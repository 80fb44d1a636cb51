"""LRU in which a chunk that was never read ages faster, by a factor that follows the workload.

Source: docs/adr/0007-eviction-default.md. That evicted keys tell which kind of chunk has too little
    room is ARC's idea (Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST
    2003).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction.base import EvictionPolicy

FIRST_FACTOR = 2.0
"""Initial factor by which chunks that were never read age faster. Fixed at this value, it gives no
measured trace fewer hits than LRU.
"""
MAX_FACTOR = 100.0
STEP = 16.0
"""Change of the factor's logarithm when as many bytes return as are held."""
NEAR_SHARE = 0.1
"""Extra room for its kind, as a part of what is held, with which a returning chunk counts as one
that should have been kept.
"""
EVICTED_SHARE = 4.0
"""Evicted keys are remembered while their chunks total this many times what is held. In a small
tier, the next turn of a conversation arrives after several turnovers.
"""
MAX_EVICTED = 1 << 17


@dataclass
class _Queue:
    """Chunks of one kind.

    Attributes:
        touched: The chunks, least recently touched first: size in bytes, and the policy's clock at
            that time.
        evicted_bytes: Total size of the chunks evicted from here so far.
    """

    touched: OrderedDict[ChunkKey, tuple[int, int]] = field(default_factory=OrderedDict)
    evicted_bytes: int = 0


class AdaptivePolicy(EvictionPolicy):
    """Evicts the chunk with the highest age; chunks that were never read age faster by a factor.
    Every call is O(1), amortised.

    Age is measured in bytes touched since. Evicted keys are remembered for a while: one that
    returns counts as read, and if a little more room for its kind would have kept it, the factor
    changes in favour of that kind, between 1 (LRU) and `MAX_FACTOR`.
    """

    def __init__(self) -> None:
        self._new = _Queue()
        self._read = _Queue()
        self._evicted: OrderedDict[ChunkKey, tuple[_Queue, int, int]] = OrderedDict()
        self._remembered_bytes = 0
        self._held_bytes = 0
        self._clock = 0
        self._log_factor = math.log(FIRST_FACTOR)
        self._offered: ChunkKey | None = None

    @property
    def factor(self) -> float:
        """How much faster chunks that were never read age now."""
        return math.exp(self._log_factor)

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        assert key not in self._new.touched, "a key is inserted once"
        assert key not in self._read.touched, "a key is inserted once"
        num_bytes = max(num_bytes, 1)
        self._held_bytes += num_bytes
        self._touch(self._read if self._recall(key) else self._new, key, num_bytes)

    @override
    def on_access(self, key: ChunkKey) -> None:
        queue = self._queue_of(key)
        num_bytes, _ = queue.touched.pop(key)
        self._touch(self._read, key, num_bytes)

    @override
    def on_remove(self, key: ChunkKey) -> None:
        queue = self._queue_of(key)
        num_bytes, _ = queue.touched.pop(key)
        self._held_bytes -= num_bytes
        if key == self._offered:
            self._offered = None
            queue.evicted_bytes += num_bytes
            self._evicted[key] = queue, num_bytes, queue.evicted_bytes
            self._remembered_bytes += num_bytes
            limit_bytes = EVICTED_SHARE * self._held_bytes
            while self._remembered_bytes > limit_bytes or len(self._evicted) > MAX_EVICTED:
                self._remembered_bytes -= self._evicted.popitem(last=False)[1][1]

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield keys in order of eviction; a declined key counts as read."""
        for _ in range(len(self)):
            self._offered = key = self._oldest()
            yield key
            if key == self._offered:
                self.on_access(key)

    @override
    def coldest_first(self) -> list[ChunkKey]:
        return [*self._new.touched, *self._read.touched]

    def __len__(self) -> int:
        return len(self._new.touched) + len(self._read.touched)

    def _queue_of(self, key: ChunkKey) -> _Queue:
        return self._new if key in self._new.touched else self._read

    def _touch(self, queue: _Queue, key: ChunkKey, num_bytes: int) -> None:
        self._clock += num_bytes
        queue.touched[key] = num_bytes, self._clock

    def _oldest(self) -> ChunkKey:
        new = next(iter(self._new.touched.items()), None)
        read = next(iter(self._read.touched.items()), None)
        if new is None or read is None:
            oldest = new or read
            assert oldest is not None, "called only while chunks are held"
            return oldest[0]
        (new_key, (_, new_at)), (read_key, (_, read_at)) = new, read
        is_new = self.factor * (self._clock - new_at) >= self._clock - read_at
        return new_key if is_new else read_key

    def _recall(self, key: ChunkKey) -> bool:
        """Learn from an inserted key; return whether it was evicted recently."""
        evicted = self._evicted.pop(key, None)
        if evicted is None:
            return False
        queue, num_bytes, at_bytes = evicted
        self._remembered_bytes -= num_bytes
        if queue.evicted_bytes - at_bytes <= NEAR_SHARE * self._held_bytes:
            step = STEP * num_bytes / self._held_bytes
            changed = self._log_factor + (step if queue is self._read else -step)
            self._log_factor = min(max(changed, 0.0), math.log(MAX_FACTOR))
        return True
