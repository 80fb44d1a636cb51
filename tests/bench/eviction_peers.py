"""Eviction policies of other caches, as far as hit ratios need them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from lmcache_core._typing import override
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction import EvictionPolicy

Queue = OrderedDict[ChunkKey, None]
WINDOW_SHARE = 0.01
"""What W-TinyLFU keeps for chunks that have just come."""
AGE_AFTER = 10
"""W-TinyLFU halves its counts after so many accesses for each chunk that is held."""


class _TwoQueues(EvictionPolicy):
    """Chunks of one size in two queues.

    Attributes:
        new: Where chunks begin.
        kept: Where others are.
    """

    def __init__(self) -> None:
        self.new: Queue = OrderedDict()
        self.kept: Queue = OrderedDict()

    @override
    def on_remove(self, key: ChunkKey) -> None:
        (self.new if key in self.new else self.kept).pop(key)

    @override
    def coldest_first(self) -> list[ChunkKey]:
        return [*self.new, *self.kept]

    def __len__(self) -> int:
        return len(self.new) + len(self.kept)


class FIFOPolicy(_TwoQueues):
    """First in, first out."""

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        self.new[key] = None

    @override
    def on_access(self, key: ChunkKey) -> None:
        """Change nothing."""

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield the oldest first."""
        while self.new:
            yield next(iter(self.new))


class ARCPolicy(_TwoQueues):
    """ARC. Source: Megiddo, Modha, FAST 2003, figure 4; the capacity is what is held now."""

    def __init__(self) -> None:
        super().__init__()
        self._ghosts: tuple[Queue, Queue] = OrderedDict(), OrderedDict()
        self._target = 0.0

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        for here, other, sign in ((0, 1, 1), (1, 0, -1)):
            ghosts = self._ghosts[here]
            if key in ghosts:
                step = sign * max(1.0, len(self._ghosts[other]) / len(ghosts))
                self._target = min(max(self._target + step, 0.0), len(self) + 1)
                del ghosts[key]
                self.kept[key] = None
                return
        self.new[key] = None

    @override
    def on_access(self, key: ChunkKey) -> None:
        self.on_remove(key)
        self.kept[key] = None

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield from the first queue while it has more than its target."""
        while len(self):
            num_held = len(self)
            is_new = bool(self.new) and (len(self.new) > self._target or not self.kept)
            key = next(iter(self.new if is_new else self.kept))
            yield key
            self._ghosts[not is_new][key] = None
            while len(self._ghosts[0]) + len(self.new) > num_held and self._ghosts[0]:
                self._ghosts[0].popitem(last=False)
            while len(self._ghosts[0]) + len(self._ghosts[1]) > num_held:
                self._ghosts[bool(self._ghosts[1])].popitem(last=False)


class TinyLFUPolicy(_TwoQueues):
    """W-TinyLFU with exact counts. Source: Einziger, Friedman, Manes: "TinyLFU: a highly efficient
    cache admission policy", TOS 2017; the main queue is LRU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[ChunkKey] = Counter()
        self._num_counted = 0
        self._is_filling = True

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        self._count(key)
        self.new[key] = None

    @override
    def on_access(self, key: ChunkKey) -> None:
        self._count(key)
        (self.new if key in self.new else self.kept).move_to_end(key)

    @override
    def victims(self) -> Iterator[ChunkKey]:
        """Yield what was asked for less often: the oldest of the window, or of the others."""
        while self._is_filling and len(self.new) > 1 + WINDOW_SHARE * len(self):
            self.kept[self.new.popitem(last=False)[0]] = None  # there has been room so far
        self._is_filling = False
        while len(self):
            if len(self.new) <= WINDOW_SHARE * len(self) and self.kept:
                yield next(iter(self.kept))
                continue
            candidate = next(iter(self.new))
            oldest = next(iter(self.kept), candidate)
            if self._counts[candidate] > self._counts[oldest]:
                del self.new[candidate]
                self.kept[candidate] = None
                candidate = oldest
            yield candidate

    def _count(self, key: ChunkKey) -> None:
        self._counts[key] += 1
        self._num_counted += 1
        if self._num_counted > AGE_AFTER * max(len(self), 1):
            self._num_counted = 0
            self._counts = Counter({key: n // 2 for key, n in self._counts.items() if n > 1})
