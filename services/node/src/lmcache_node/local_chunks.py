"""The chunks of a node's own tiers, read without displacing others from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.buffer import BufferAllocator
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.hot import LocalCPUBackend

MAX_READING_BYTES = 256 << 20
"""Memory for chunks read from disk to be sent, both encoded and decoded."""


@dataclass(frozen=True)
class LocalChunks:
    """Lists and reads the chunks in memory and on disk. Reads bypass the memory tier: otherwise
    they would evict chunks that have not been handed over yet.

    Attributes:
        hot: The memory tier.
        listed: Lists the chunks on disk; None without a disk.
        disk: Reads from the disk, in its guard; None without one.
        timeout_s: Longest wait for the disk per batch.
        is_wanted: Selects the chunks that are listed.
    """

    hot: LocalCPUBackend
    listed: DiskBackend | None
    disk: StorageBackend | None
    timeout_s: float
    is_wanted: Callable[[ChunkKey], bool]
    _buffers: BufferAllocator = field(
        init=False, default_factory=lambda: BufferAllocator(capacity_bytes=MAX_READING_BYTES)
    )

    def hottest_first(self) -> list[tuple[ChunkKey, int]]:
        """Return name and size in bytes of every chunk: those in memory, then those only on disk,
        newest first. Takes time in proportion to their number; call it in a thread.
        """
        found = dict(self.hot.hottest())
        for key, num_bytes in [] if self.listed is None else reversed(self.listed.held()):
            found.setdefault(key, num_bytes)
        return [(key, num_bytes) for key, num_bytes in found.items() if self.is_wanted(key)]

    async def read(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """Return chunks, with a reference each owned by the caller, or the reasons why they cannot
        be read.
        """
        results: list[Result] = [
            Miss(MissReason.NEVER_STORED) if chunk is None else chunk
            for chunk in self.hot.get_many(keys)
        ]
        cold = [i for i, result in enumerate(results) if isinstance(result, Miss)]
        if not cold or self.disk is None:
            return results
        try:
            read = await self.disk.batched_get(
                [keys[i] for i in cold],
                lambda num_bytes: self._buffers.allocate((num_bytes,), None),
                self.timeout_s,
            )
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
