"""An explicit free list over a range of offsets: best fit, coalescing, fast for any number of
extents.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from lmcache_core.errors import IntegrityError
from lmcache_core.memory.base import FreeBlock

ALIGN_BYTES = 512


def extent_bytes(size: int) -> int:
    """Return what `size` bytes take in an arena: whole units of the alignment, at least one."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES or ALIGN_BYTES


class FreeList:
    """Offsets in `[0, capacity)`, in multiples of `ALIGN_BYTES`. Not thread-safe: its owner locks.

    Free extents are kept in one bin per size, and the sizes in use are sorted. A neighbour is found
    by the offset at which it begins or ends, so a search is needed only when a size appears or
    vanishes; distinct sizes are few, and a plain list of them is fast.

    Args:
        capacity: Bytes to manage; a tail shorter than the alignment is left unused.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % ALIGN_BYTES
        self.used_bytes = 0
        self._used: dict[int, int] = {}
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        if self.capacity:
            self._insert(0, self.capacity)

    @property
    def num_used_blocks(self) -> int:
        """Number of allocated blocks."""
        return len(self._used)

    def free_blocks(self) -> list[FreeBlock]:
        """Return the free extents, by start."""
        return [FreeBlock(start, size) for start, size in sorted(self._size_at.items())]

    def allocate(self, size: int) -> FreeBlock | None:
        """Take the smallest free extent that holds `size` bytes (at least one alignment unit);
        among equals, the one freed last.

        Returns:
            The extent taken, its size a multiple of the alignment; None if no extent is large
                enough.
        """
        wanted = have = extent_bytes(size)
        if wanted not in self._bins:
            at = bisect_left(self._sizes, wanted)
            if at == len(self._sizes):
                return None
            have = self._sizes[at]
        starts = self._bins[have]
        # O(1); the last entry of a dict takes O(n) to find after deletions behind it.
        start, _ = starts.popitem()
        self._unindex(start, have, starts)
        if have > wanted:
            self._insert(start + wanted, have - wanted)
        self._used[start] = wanted
        self.used_bytes += wanted
        return FreeBlock(start, wanted)

    def take(self, extents: Sequence[FreeBlock]) -> None:
        """Take exactly these extents, which an earlier process has allocated.

        Raises:
            ValueError: One is empty, not aligned, out of bounds, not free, or overlaps another;
                then nothing has been taken.
        """
        holes = self.free_blocks()
        starts = [hole.start for hole in holes]
        taken_of: dict[FreeBlock, list[FreeBlock]] = {}
        end = 0
        for extent in sorted(extents):
            hole = holes[bisect_right(starts, extent.start) - 1] if starts else FreeBlock(0, 0)
            is_inside = (
                hole.start <= extent.start and extent.start + extent.size <= hole.start + hole.size
            )
            if (
                extent.size <= 0
                or extent.size % ALIGN_BYTES
                or extent.start % ALIGN_BYTES
                or extent.start < end
                or not is_inside
            ):
                raise ValueError(
                    f"[{extent.start}, {extent.start + extent.size}) is not a free extent of"
                    f" {self.capacity} bytes"
                )
            taken_of.setdefault(hole, []).append(extent)
            end = extent.start + extent.size
        for hole, taken in taken_of.items():
            self._remove(hole.start, hole.size)
            at = hole.start
            for extent in taken:
                if extent.start > at:
                    self._insert(at, extent.start - at)
                self._used[extent.start] = extent.size
                self.used_bytes += extent.size
                at = extent.start + extent.size
            if hole.start + hole.size > at:
                self._insert(at, hole.start + hole.size - at)

    def free(self, start: int) -> None:
        """Free the extent that begins at `start`, and join it with free neighbours.

        Raises:
            IntegrityError: No allocated extent begins there (freed twice, or never allocated).
        """
        size = self._used.pop(start, None)
        if size is None:
            raise IntegrityError(f"free of offset {start}: no block is allocated there")
        self.used_bytes -= size
        end = start + size
        size_after = self._size_at.get(end)
        if size_after is not None:
            self._remove(end, size_after)
            end += size_after
        start_before = self._start_before.get(start)
        if start_before is not None:
            self._remove(start_before, start - start_before)
            start = start_before
        self._insert(start, end - start)

    def check_integrity(self) -> None:
        """Check the accounting, in O(n).

        Raises:
            IntegrityError: Extents overlap, leave gaps, are not coalesced, or the sums and indexes
                are wrong.
        """
        at, num_seen, was_free, used_bytes = 0, 0, False, 0
        while at < self.capacity:
            is_free = at in self._size_at
            size = self._size_at[at] if is_free else self._used.get(at, 0)
            if size <= 0 or size % ALIGN_BYTES:
                raise IntegrityError(f"no extent, or one of {size} bytes, begins at {at}")
            if is_free and was_free:
                raise IntegrityError(f"free extents meet at {at} and were not joined")
            used_bytes += 0 if is_free else size
            at, num_seen, was_free = at + size, num_seen + 1, is_free
        if at != self.capacity or used_bytes != self.used_bytes:
            raise IntegrityError(
                f"extents end at {at} of {self.capacity}; {used_bytes} bytes are allocated, the"
                f" total says {self.used_bytes}"
            )
        if num_seen != len(self._size_at) + len(self._used):
            raise IntegrityError(
                f"{len(self._size_at)} free extents and {len(self._used)} allocated ones overlap:"
                f" only {num_seen} follow one another"
            )
        self._check_indexes()

    def _check_indexes(self) -> None:
        num_binned = sum(len(starts) for starts in self._bins.values())
        if (
            num_binned != len(self._size_at)
            or len(self._start_before) != len(self._size_at)
            or set(self._sizes) != set(self._bins)
        ):
            raise IntegrityError("the free extents by size or by end are not those by start")
        for start, size in self._size_at.items():
            if (
                start not in self._bins.get(size, ())
                or self._start_before.get(start + size) != start
            ):
                raise IntegrityError(
                    f"the free extent [{start}, {start + size}) is not where its size or its end"
                    " says"
                )

    def _insert(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_before[start + size] = start
        starts = self._bins.get(size)
        if starts is None:
            self._bins[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None

    def _remove(self, start: int, size: int) -> None:
        starts = self._bins[size]
        del starts[start]
        self._unindex(start, size, starts)

    def _unindex(self, start: int, size: int, starts: dict[int, None]) -> None:
        del self._size_at[start]
        del self._start_before[start + size]
        if not starts:
            del self._bins[size]
            del self._sizes[bisect_left(self._sizes, size)]
