"""The chunks of this sidecar's own tiers, as a drain reads them."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import MemoryObj
from lmcache_core.memory.buffer import BufferAllocator
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import ListsKeys, StorageBackend
from lmcache_core.storage.hot import LocalCPUBackend

MAX_READING_BYTES = 256 << 20
"""Memory for chunks that are read from disk to be sent, encoded and decoded."""


class LocalChunks:
    """Reads without making room in shared memory: what would go there has not been handed over yet.

    Args:
        tenant: Whose chunks are handed over. Others that may lie on a disk would arrive under this
            name.
        hot: Shared memory.
        listed: Tells what the disk holds; None without one.
        disk: Reads from it, decoded.
    """

    def __init__(
        self,
        tenant: str,
        hot: LocalCPUBackend,
        listed: ListsKeys | None,
        disk: StorageBackend | None,
    ) -> None:
        self._tenant = tenant
        self._hot = hot
        self._listed = listed
        self._disk = disk
        self._buffers = BufferAllocator(capacity_bytes=MAX_READING_BYTES)

    def hottest_first(self) -> list[tuple[ChunkKey, int]]:
        """Name and size in bytes of every chunk: those in memory, then those on disk alone, the
        newest first.
        """
        on_disk = [] if self._listed is None else reversed(self._listed.held())
        found = dict(self._hot.hottest())
        for key, num_bytes in on_disk:
            found.setdefault(key, num_bytes)
        return [(key, num_bytes) for key, num_bytes in found.items() if key.tenant == self._tenant]

    async def read(self, keys: Sequence[ChunkKey], timeout_s: float) -> list[Result]:
        """Chunks, a reference each owned by the caller, or why they cannot be read."""
        results: list[Result] = [
            Miss(MissReason.NEVER_STORED) if chunk is None else chunk
            for chunk in self._hot.get_many(keys)
        ]
        cold = [i for i, result in enumerate(results) if isinstance(result, Miss)]
        if not cold or self._disk is None:
            return results
        try:
            read = await self._disk.batched_get([keys[i] for i in cold], self._allocate, timeout_s)
        except UnavailableError:
            read = [Miss(MissReason.UNAVAILABLE)] * len(cold)
        except BaseException:
            for result in results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        for i, result in zip(cold, read, strict=True):
            results[i] = result
        return results

    def _allocate(self, num_bytes: int) -> MemoryObj | None:
        return self._buffers.allocate((num_bytes,), None)
