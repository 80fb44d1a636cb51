"""Memory objects over plain Python bytes, outside any arena."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core._typing import override
from lmcache_core.errors import IntegrityError
from lmcache_core.memory.base import FreeBlock, MemoryFormat, MemoryObjMetadata
from lmcache_core.memory.counted import CountedMemoryObj, CountingAllocator

if TYPE_CHECKING:
    import torch

DEFAULT_BUFFER_CAPACITY_BYTES = 5 << 30
"""Equal to the documented default of `max_local_cpu_size`."""


class BytesBufferMemoryObj(CountedMemoryObj):
    """Bytes that the garbage collector owns.

    Args:
        raw_bytes: The content, shared, not copied.
        metadata: Describes the content; by default flat bytes in `BINARY_BUFFER` format.
        allocator: Counts its references and its bytes; without one the count is always 1.
    """

    def __init__(
        self,
        raw_bytes: bytes | bytearray | memoryview,
        metadata: MemoryObjMetadata | None = None,
        allocator: CountingAllocator | None = None,
    ) -> None:
        view = memoryview(raw_bytes).cast("B")
        super().__init__(
            view,
            metadata or MemoryObjMetadata((len(view),), None, 0, 0, 1, MemoryFormat.BINARY_BUFFER),
            allocator,
        )


class ByteBudget:
    """A budget of bytes in use, wherever they are. Not thread-safe: its owner locks.

    Args:
        capacity: Bytes.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity={capacity}: must not be negative")
        self.capacity = capacity
        self.used_bytes = 0
        self._used: dict[int, int] = {}
        self._names = itertools.count()

    @property
    def num_used_blocks(self) -> int:
        """Number of allocated blocks."""
        return len(self._used)

    def allocate(self, size: int) -> FreeBlock | None:
        """Take `size` bytes (at least one, so that empty blocks are bounded, too); None if fewer
        are left.

        Returns:
            A block whose `start` is not an offset but an id, never reused.
        """
        taken = max(size, 1)
        if taken > self.capacity - self.used_bytes:
            return None
        name = next(self._names)
        self._used[name] = taken
        self.used_bytes += taken
        return FreeBlock(name, taken)

    def free(self, start: int) -> None:
        """Return the block with that id to the budget.

        Raises:
            IntegrityError: There is no such block.
        """
        size = self._used.pop(start, None)
        if size is None:
            raise IntegrityError(f"free of block {start}: it is not allocated")
        self.used_bytes -= size

    def check_integrity(self) -> None:
        """Check the accounting.

        Raises:
            IntegrityError: The sum is wrong or exceeds the budget.
        """
        used_bytes = sum(self._used.values())
        if used_bytes != self.used_bytes or used_bytes > self.capacity:
            raise IntegrityError(
                f"blocks hold {used_bytes} bytes, the total says {self.used_bytes} of"
                f" {self.capacity}"
            )


class BufferAllocator(CountingAllocator):
    """Allocates zeroed `BytesBufferMemoryObj`s within a budget. Thread-safe.

    Args:
        device: Must be "cpu".
        capacity_bytes: Bytes that may be allocated at a time.

    Raises:
        ValueError: Another device, or a negative capacity.
    """

    def __init__(
        self, device: str = "cpu", capacity_bytes: int = DEFAULT_BUFFER_CAPACITY_BYTES
    ) -> None:
        if device != "cpu":
            raise ValueError(f"device={device!r}: must be 'cpu', where byte buffers live")
        self.device = device
        super().__init__(ByteBudget(capacity_bytes))

    @override
    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.BINARY_BUFFER,
    ) -> BytesBufferMemoryObj | None:
        """Allocate zeros; the address in the metadata is an id, not a location."""
        meta = self._take(tuple(shape), dtype, fmt)
        if meta is None:
            return None
        try:
            content = bytearray(meta.get_size())
        except (MemoryError, OverflowError):  # the budget allows more than the machine has
            with self._lock:
                self._give_back(meta)
            return None
        return BytesBufferMemoryObj(content, meta, self)
