"""An explicit free list over a range of offsets: best fit, coalescing, O(log n) per operation."""

from __future__ import annotations

from sortedcontainers import SortedDict, SortedList

from lmcache_core.errors import IntegrityError
from lmcache_core.memory.base import FreeBlock

ALIGN_BYTES = 512


def align_up(size: int, align: int = ALIGN_BYTES) -> int:
    """The smallest multiple of `align` that is at least `size`."""
    return -(-size // align) * align


class FreeList:
    """Offsets in `[0, capacity)`, cut at multiples of `ALIGN_BYTES`. Not thread-safe: its owner locks.

    Args:
        capacity: Bytes to manage; a tail shorter than the alignment is left unused.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % ALIGN_BYTES
        self._by_start: SortedDict = SortedDict()
        self._by_size: SortedList = SortedList()
        self._used: dict[int, int] = {}
        self.used_bytes = 0
        if self.capacity:
            self._insert(0, self.capacity)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are handed out."""
        return len(self._used)

    def free_blocks(self) -> list[FreeBlock]:
        """The free extents, by start."""
        return [FreeBlock(start, size) for start, size in self._by_start.items()]

    def allocate(self, size: int) -> FreeBlock | None:
        """Take the smallest free extent that holds `size` bytes (at least one alignment unit).

        Returns:
            The extent taken, its size a multiple of the alignment; None when no extent is large enough.
        """
        wanted = align_up(max(size, 1))
        at = self._by_size.bisect_left((wanted, -1))
        if at == len(self._by_size):
            return None
        have, start = self._by_size[at]
        self._remove(start, have)
        if have > wanted:
            self._insert(start + wanted, have - wanted)
        self._used[start] = wanted
        self.used_bytes += wanted
        return FreeBlock(start, wanted)

    def free(self, start: int) -> None:
        """Give back the extent that begins at `start`, joined with free neighbours.

        Raises:
            IntegrityError: No extent handed out begins there (freed twice, or never allocated).
        """
        size = self._used.pop(start, None)
        if size is None:
            raise IntegrityError(f"free of offset {start}: no block is handed out there")
        self.used_bytes -= size
        at = self._by_start.bisect_left(start)
        if at < len(self._by_start):
            next_start, next_size = self._by_start.peekitem(at)
            if start + size == next_start:
                self._remove(next_start, next_size)
                size += next_size
        if at > 0:
            prev_start, prev_size = self._by_start.peekitem(at - 1)
            if prev_start + prev_size == start:
                self._remove(prev_start, prev_size)
                start, size = prev_start, prev_size + size
        self._insert(start, size)

    def check_integrity(self) -> None:
        """Compare the books.

        Raises:
            IntegrityError: Extents overlap, leave gaps, are not coalesced, or the sums are wrong.
        """
        extents = sorted([(s, n, True) for s, n in self._by_start.items()] + [(s, n, False) for s, n in self._used.items()])
        at, was_free = 0, False
        for start, size, is_free in extents:
            if start != at or size <= 0 or size % ALIGN_BYTES:
                raise IntegrityError(f"extent [{start}, {start + size}) does not follow {at}")
            if is_free and was_free:
                raise IntegrityError(f"free extents meet at {start} and were not joined")
            at, was_free = start + size, is_free
        if at != self.capacity or self.used_bytes != sum(self._used.values()):
            raise IntegrityError(f"extents end at {at} of {self.capacity}; used {self.used_bytes} against {sum(self._used.values())}")
        if sorted(self._by_size) != sorted((n, s) for s, n in self._by_start.items()):
            raise IntegrityError("the free extents by size are not those by start")

    def _insert(self, start: int, size: int) -> None:
        self._by_start[start] = size
        self._by_size.add((size, start))

    def _remove(self, start: int, size: int) -> None:
        del self._by_start[start]
        self._by_size.remove((size, start))
