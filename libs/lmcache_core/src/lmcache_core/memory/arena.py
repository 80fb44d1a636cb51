"""Allocation in one byte arena: a private mapping or a shared-memory file. No torch until
`.tensor`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core._typing import override
from lmcache_core.errors import CapacityError
from lmcache_core.memory.base import FreeBlock, MemoryFormat, MemoryObjMetadata
from lmcache_core.memory.counted import CountedMemoryObj, CountingAllocator, OnFreed
from lmcache_core.memory.free_list import FreeList, extent_bytes
from lmcache_core.memory.populate import populate

if TYPE_CHECKING:
    import torch


def touched_memory(size: int) -> memoryview:
    """Return at least `size` bytes of private host memory in whole pages: writable, page-aligned,
    and touched so that first use is fast.

    Uses huge pages if the kernel supports them: touching them is several times faster.

    Raises:
        ValueError: The size is negative.
        CapacityError: The machine does not have that much.
    """
    if size < 0:
        raise ValueError(f"size={size}: must not be negative")
    length = max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
    try:
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as exc:
        raise CapacityError(
            f"an arena of {size / (1 << 30):.2f} GB: {exc}; make it smaller"
        ) from exc
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    try:
        populate(view)
    except OSError as exc:
        raise CapacityError(
            f"an arena of {size / (1 << 30):.2f} GB: {exc.strerror}; make it smaller"
        ) from exc
    return view


class ArenaMemoryObj(CountedMemoryObj):
    """A piece of an arena, created by `ArenaAllocator`."""

    __slots__ = ()


class ArenaAllocator(CountingAllocator):
    """Divides one writable buffer into memory objects. Thread-safe.

    Args:
        buffer: Writable, contiguous bytes; stays referenced while the allocator lives.
        on_freed: Called with the offset of everything that is freed, under the allocator's lock: it
            must not call back.

    Raises:
        ValueError: The buffer is read-only.
    """

    def __init__(self, buffer: memoryview, on_freed: OnFreed | None = None) -> None:
        if buffer.readonly:
            raise ValueError("an arena needs a writable buffer")
        self._buffer = buffer.cast("B")
        self._extents = FreeList(len(self._buffer))
        super().__init__(self._extents, on_freed)

    @classmethod
    def anonymous(cls, size: int) -> ArenaAllocator:
        """Return an arena of `size` bytes (at least one page) of private memory, touched so that
        first use is fast.
        """
        return cls(touched_memory(size)[: max(size, mmap.PAGESIZE)])

    @override
    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.KV_BLOB,
    ) -> ArenaMemoryObj | None:
        meta = self._take(tuple(shape), dtype, fmt)
        return None if meta is None else self._object(meta)

    def take(self, extents: Sequence[tuple[int, int]]) -> list[ArenaMemoryObj]:
        """Allocate exactly these extents, which an earlier process has allocated: offset and size
        each.

        Returns:
            One object of plain bytes each, with one reference, which the caller owns.

        Raises:
            ValueError: They are not free, not aligned, out of bounds or overlap; then nothing has
                been allocated.
        """
        blocks = [FreeBlock(offset, extent_bytes(size)) for offset, size in extents]
        metas = [
            MemoryObjMetadata((size,), None, block.start, block.size, 1, MemoryFormat.BINARY)
            for (_, size), block in zip(extents, blocks, strict=True)
        ]
        with self._lock:
            self._extents.take(blocks)
            self._handed_out.update((meta.address, meta) for meta in metas)
        return [self._object(meta) for meta in metas]

    def _object(self, meta: MemoryObjMetadata) -> ArenaMemoryObj:
        view = self._buffer[meta.address : meta.address + meta.get_size()]
        return ArenaMemoryObj(view, meta, self)
