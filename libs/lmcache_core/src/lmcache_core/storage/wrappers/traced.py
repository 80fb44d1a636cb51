"""A tier whose calls are spans of the requests that they are made for."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.wrappers.base import WrapperBackend
from lmcache_core.telemetry.request_context import step


class TracedBackend(WrapperBackend):
    """Makes a span of each call, named after the tier; one that raises, or that its caller gives
    up, has failed.

    Where nothing is traced that is one look at a context variable. What is written behind belongs
    to no request, and has no span.
    """

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self._contains, self._get, self._put, self._remove = (
            span_name(self.name, what) for what in ("contains", "get", "put", "remove")
        )

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        with step(self._contains):
            return await self._backend.batched_contains(keys)

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """See `StorageBackend.batched_get`."""
        with step(self._get):
            return await self._backend.batched_get(keys, allocate, timeout_s)

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        with step(self._put):
            return await self._backend.batched_put(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        with step(self._remove):
            return await self._backend.batched_remove(keys)


def span_name(tier: str, operation: str) -> str:
    """What a call of a tier is called in traces."""
    return f"tier {tier} {operation}"
