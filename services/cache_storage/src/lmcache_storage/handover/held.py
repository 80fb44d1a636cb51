"""The chunks of this server, as a move reads them."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import MemoryObj
from lmcache_core.memory.buffer import BufferAllocator
from lmcache_core.record import Chunk
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_core.storage.base import StorageBackend

from lmcache_storage.compat.values import is_foreign

MAX_READING_BYTES = 256 << 20
"""Memory for chunks that are read from disk to be sent."""


class HeldChunks:
    """Reads without making room in memory: what would go there has not been sent yet.

    Args:
        hot: Memory.
        listed: Tells what the disk holds; None without one.
        disk: Reads from it, behind its breaker; None without one.
        timeout_s: Longest wait for the disk, for one batch.
    """

    def __init__(
        self,
        hot: LocalCPUBackend,
        listed: DiskBackend | None,
        disk: StorageBackend | None,
        timeout_s: float,
    ) -> None:
        self._hot = hot
        self._listed = listed
        self._disk = disk
        self._timeout_s = timeout_s
        self._buffers = BufferAllocator(capacity_bytes=MAX_READING_BYTES)

    def hottest_first(self) -> list[tuple[ChunkKey, int]]:
        """Name and size in bytes of every chunk of every tenant: those in memory, then those on
        disk alone, the newest first.

        Values of LMCache clients are left out: these clients know one server, and would not find
        them at another.
        """
        found = dict(self._hot.hottest())
        for key, num_bytes in [] if self._listed is None else reversed(self._listed.held()):
            found.setdefault(key, num_bytes)
        return [(key, num_bytes) for key, num_bytes in found.items() if not is_foreign(key)]

    def has_room(self, num_bytes: int, pending_bytes: int) -> bool:
        """Whether a record of that size could be kept without giving up another.

        Args:
            num_bytes: Of the record.
            pending_bytes: Still to be written to the disk.
        """
        if self._listed is not None:
            figures = self._listed.stats()
            return figures["used_bytes"] + pending_bytes + num_bytes <= figures["capacity_bytes"]
        figures = self._hot.stats()
        return figures["arena_used_bytes"] + num_bytes <= figures["capacity_bytes"]

    async def read(self, keys: Sequence[ChunkKey]) -> list[Chunk]:
        """Those that can be read, a reference each owned by the caller."""
        in_memory = self._hot.get_many(keys)
        found = [chunk for chunk in in_memory if chunk is not None]
        cold = [key for key, chunk in zip(keys, in_memory, strict=True) if chunk is None]
        if not cold or self._disk is None:
            return found
        try:
            read = await self._disk.batched_get(cold, self._allocate, self._timeout_s)
        except UnavailableError:
            return found
        except BaseException:
            for chunk in found:
                chunk.release()
            raise
        return found + [result for result in read if isinstance(result, Chunk)]

    def _allocate(self, num_bytes: int) -> MemoryObj | None:
        return self._buffers.allocate((num_bytes,), None)
