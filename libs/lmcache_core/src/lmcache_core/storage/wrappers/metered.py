"""A tier whose calls are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.wrappers.base import WrapperBackend
from lmcache_core.telemetry import (
    MISSED_CHUNKS_TOTAL,
    TIER_BYTES_TOTAL,
    TIER_CALLS_TOTAL,
    TIER_CHUNKS_TOTAL,
    TIER_FAILURES_TOTAL,
    TIER_MICROSECONDS_TOTAL,
    Counters,
)

_PREFIX, _SUFFIX = "lmcache_tier_", "_total"


class MeteredBackend(WrapperBackend):
    """Counts calls, chunks, bytes, failed calls and time, each by operation, and misses by reason.

    A call that raises, or that its caller gives up, is a failure; its time counts too. Chunks are
    those found, got, kept, removed.

    Args:
        backend: What is wrapped.
        counters: Where to count; for this tier alone, since the one label that a counter has is the
            operation or the reason.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        backend: StorageBackend,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(backend)
        self._counters = Counters() if counters is None else counters
        self._clock = clock

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        with self._call("contains"):
            found = await self._backend.batched_contains(keys)
        self._counters.add(TIER_CHUNKS_TOTAL, sum(found), "contains")
        return found

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """See `StorageBackend.batched_get`."""
        with self._call("get"):
            results = await self._backend.batched_get(keys, allocate, timeout_s)
        for result in results:
            if isinstance(result, Chunk):
                self._count_chunk("get", result)
            else:
                self._counters.add(MISSED_CHUNKS_TOTAL, 1, result.reason)
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        with self._call("put"):
            kept = await self._backend.batched_put(chunks)
        for chunk, is_kept in zip(chunks, kept, strict=True):
            if is_kept:
                self._count_chunk("put", chunk)
        return kept

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        with self._call("remove"):
            num_removed = await self._backend.batched_remove(keys)
        self._counters.add(TIER_CHUNKS_TOTAL, num_removed, "remove")
        return num_removed

    async def clear(self, tenant: str | None = None) -> int:
        """See `StorageBackend.clear`."""
        with self._call("clear"):
            num_removed = await self._backend.clear(tenant)
        self._counters.add(TIER_CHUNKS_TOTAL, num_removed, "clear")
        return num_removed

    def stats(self) -> dict[str, int]:
        """The backend's figures, and what was counted: `get_calls`, `get_bytes`,
        `put_microseconds`, `missed_evicted` and so on.
        """
        return self._backend.stats() | {
            _figure(name, label): value
            for (name, label), value in self._counters.snapshot().items()
            if label and value
        }

    def _count_chunk(self, operation: str, chunk: Chunk) -> None:
        self._counters.add(TIER_CHUNKS_TOTAL, 1, operation)
        self._counters.add(TIER_BYTES_TOTAL, chunk.num_bytes, operation)

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        began = self._clock()
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            self._counters.add(TIER_CALLS_TOTAL, 1, operation)
            self._counters.add(TIER_FAILURES_TOTAL, int(has_failed), operation)
            self._counters.add(
                TIER_MICROSECONDS_TOTAL, int((self._clock() - began) * 1e6), operation
            )


def _figure(name: str, label: str) -> str:
    return (
        f"missed_{label}"
        if name == MISSED_CHUNKS_TOTAL
        else f"{label}_{name.removeprefix(_PREFIX).removesuffix(_SUFFIX)}"
    )
