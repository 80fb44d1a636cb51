"""The engine's chunk store in embedded mode: tiers in this process, behind a sync face."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from lmcache_core.concurrency import LoopThread
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory.base import MemoryAllocatorInterface, MemoryFormat, MemoryObj
from lmcache_core.record import Chunk, HotVerifier, Miss, MissReason
from lmcache_core.storage.assembly import create_lower_tiers
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, Counters

CLOSE_DRAIN_S = 5.0
MARGIN_S = 0.5


class StorageManager:
    """See `lmcache_core.engine.ChunkStore`.

    Hot chunks are served in the caller's thread; only what is not hot crosses to the loop thread.

    Args:
        config: Which tiers there are.
        memory_allocator: Host memory for chunks.
        counters: Where misses are counted.
    """

    def __init__(self, config: LMCacheEngineConfig, memory_allocator: MemoryAllocatorInterface, counters: Counters) -> None:
        self._hot = LocalCPUBackend(memory_allocator, create_policy())
        self._lower = create_lower_tiers(config)
        self._keep_hot = config.local_cpu
        self._timeout_s = config.tier_timeout_s
        self._verifier = HotVerifier(config.verify_hot)
        self._counters = counters
        self._loop = LoopThread("lmcache-storage")
        self._stack: TierStack | None = None
        self._salt = config.salt

    def open(self, on_salt: Callable[[str], None]) -> None:
        """Start the loop thread and open the tiers."""
        on_salt(self._salt)
        self._loop.open()
        self._stack = self._loop.run(self._open_stack(), self._timeout_s + MARGIN_S)

    def close(self) -> None:
        """Finish background writes within `CLOSE_DRAIN_S` seconds, abandon the rest, stop the loop thread. Idempotent."""
        stack, self._stack = self._stack, None
        if stack is not None:
            with contextlib.suppress(UnavailableError):
                self._loop.run(stack.close(CLOSE_DRAIN_S), CLOSE_DRAIN_S + MARGIN_S)
            self._loop.close()

    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        """See `ChunkStore.lookup`."""
        names = _names(keys)
        hot = self._hot.contains_many(names) if search_range is None or self._hot.name in search_range else [False] * len(names)
        num_hot = next((i for i, has in enumerate(hot) if not has), len(names))
        if num_hot == len(names) or not self._lower or (search_range is not None and set(search_range) <= {self._hot.name}):
            return num_hot
        tiers = self._loop.run(self._opened.batched_tiers(names, self._timeout_s, search_range), self._timeout_s + MARGIN_S)
        return next((i for i, tier in enumerate(tiers) if tier is None), len(names))

    def prefetch(self, keys: Sequence[CacheEngineKey]) -> None:
        """See `ChunkStore.prefetch`."""
        self._loop.submit(self._lift(_names(keys)))

    def reserve(self, shapes: Sequence[Sequence[int]], dtype: str) -> list[MemoryObj | None]:
        """See `ChunkStore.reserve`."""
        return [self._hot.allocate_tensor(shape, dtype, MemoryFormat.KV_BLOB) for shape in shapes]

    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `ChunkStore.put`."""
        if not self._lower and self._keep_hot:
            return self._hot.put_many(chunks)
        return self._loop.run(self._opened.batched_put(chunks), self._timeout_s + MARGIN_S)

    def get(self, keys: Sequence[CacheEngineKey]) -> list[Chunk]:
        """See `ChunkStore.get`."""
        names = _names(keys)
        if self._lower and not all(self._hot.contains_many(names)):
            wait_s = self._timeout_s + MARGIN_S
            results = self._loop.run(self._opened.batched_get(names, self._timeout_s, prefix_only=True), wait_s)
        else:
            results = [
                self._hot.miss(name) if chunk is None else chunk for name, chunk in zip(names, self._hot.get_many(names), strict=True)
            ]
        return self._intact_prefix(results)

    def release(self, chunks: Sequence[Chunk]) -> bool:
        """See `ChunkStore.release`; references in this process cannot be lost."""
        for chunk in chunks:
            chunk.release()
        return True

    def abort(self, memories: Sequence[MemoryObj]) -> None:
        """See `ChunkStore.abort`."""
        for memory in memories:
            memory.ref_count_down()

    def stats(self) -> dict[str, dict[str, int]]:
        """See `ChunkStore.stats`."""
        return self._opened.stats()

    @property
    def _opened(self) -> TierStack:
        if self._stack is None:
            raise UnavailableError("the engine is not open")
        return self._stack

    async def _open_stack(self) -> TierStack:
        stack = TierStack(self._hot, self._lower, keep_hot=self._keep_hot)
        await stack.open()
        return stack

    async def _lift(self, names: Sequence[ChunkKey]) -> None:
        for result in await self._opened.batched_get(names, self._timeout_s, prefix_only=True):
            if isinstance(result, Chunk):
                result.release()

    def _intact_prefix(self, results: Sequence[Chunk | Miss]) -> list[Chunk]:
        good: list[Chunk] = []
        for result in results:
            if isinstance(result, Miss):
                self._counters.add(MISSED_CHUNKS_TOTAL, len(results) - len(good), result.reason)
                break
            if result.tier == self._hot.name and not self._verifier.is_intact(result):
                self._counters.add(MISSED_CHUNKS_TOTAL, len(results) - len(good), MissReason.CORRUPT)
                self._hot.remove_many([result.key])
                break
            good.append(result)
        for result in results[len(good) :]:
            if isinstance(result, Chunk):
                result.release()
        return good


def _names(keys: Sequence[CacheEngineKey]) -> list[ChunkKey]:
    return [ChunkKey(DEFAULT_TENANT, key) for key in keys]
