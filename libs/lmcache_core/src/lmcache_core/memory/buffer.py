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
"""As much as the documented default of `max_local_cpu_size`."""


class BytesBufferMemoryObj(CountedMemoryObj):
    """Bytes that the garbage collector owns.

    Args:
        raw_bytes: The content, shared, not copied.
        metadata: What it holds; by default flat bytes in `BINARY_BUFFER` format.
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
    """A number of bytes that may be in use at once, wherever they are. Not thread-safe: its owner
    locks.

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
        """Blocks that are taken."""
        return len(self._used)

    def allocate(self, size: int) -> FreeBlock | None:
        """Take `size` bytes (at least one, so that empty blocks are bounded too); None when so many
        are not left.

        Returns:
            A block whose `start` is no place but a name, never used twice.
        """
        taken = max(size, 1)
        if taken > self.capacity - self.used_bytes:
            return None
        name = next(self._names)
        self._used[name] = taken
        self.used_bytes += taken
        return FreeBlock(name, taken)

    def free(self, start: int) -> None:
        """Give back the block of that name.

        Raises:
            IntegrityError: There is none.
        """
        size = self._used.pop(start, None)
        if size is None:
            raise IntegrityError(f"free of block {start}: it is not handed out")
        self.used_bytes -= size

    def check_integrity(self) -> None:
        """Compare the books.

        Raises:
            IntegrityError: The sum is wrong or over the budget.
        """
        used_bytes = sum(self._used.values())
        if used_bytes != self.used_bytes or used_bytes > self.capacity:
            raise IntegrityError(
                f"blocks hold {used_bytes} bytes, the books say {self.used_bytes} of"
                f" {self.capacity}"
            )


class BufferAllocator(CountingAllocator):
    """Makes `BytesBufferMemoryObj`s of zeros, as many as the budget allows. Thread-safe.

    Args:
        device: Must be "cpu".
        capacity_bytes: Bytes that may be handed out at once.

    Raises:
        ValueError: Another device, or a negative capacity.
    """

    def __init__(
        self, device: str = "cpu", capacity_bytes: int = DEFAULT_BUFFER_CAPACITY_BYTES
    ) -> None:
        if device != "cpu":
            raise ValueError(f"device={device!r}: byte buffers live on the cpu")
        self.device = device
        super().__init__(ByteBudget(capacity_bytes))

    @override
    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | str | None,
        fmt: MemoryFormat = MemoryFormat.BINARY_BUFFER,
    ) -> BytesBufferMemoryObj | None:
        """Allocate zeros; the address in the metadata is a name, not a place."""
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
