"""A chunk store whose calls are traced: where a trace begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core.engine.chunk_store import ChunkStore
from lmcache_core.keys import CacheEngineKey, ChunkChain
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Staged
from lmcache_core.telemetry.request_context import Carried, RequestIds, Tracer, working_for


class TracedChunkStore:
    """Wraps a chunk store; each call that may reach a tier is a span, and has an id for the logs of
    whoever works for it.

    Args:
        store: Is wrapped.
        tracer: Takes the spans; closed with the store.
    """

    def __init__(self, store: ChunkStore, tracer: Tracer) -> None:
        self._store = store
        self._tracer = tracer
        self._ids = RequestIds()

    def open(self, on_salt: Callable[[str], None]) -> None:
        """See `ChunkStore.open`."""
        self._store.open(on_salt)

    def close(self) -> None:
        """See `ChunkStore.close`."""
        try:
            self._store.close()
        finally:
            self._tracer.close()

    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        """See `ChunkStore.lookup`."""
        with working_for("engine lookup", Carried(self._ids.next()), self._tracer, is_server=False):
            return self._store.lookup(keys, search_range)

    def prefetch(self, keys: Sequence[CacheEngineKey]) -> None:
        """See `ChunkStore.prefetch`."""
        with working_for(
            "engine prefetch", Carried(self._ids.next()), self._tracer, is_server=False
        ):
            self._store.prefetch(keys)

    def is_worth(self, saving_s: float) -> bool:
        """See `ChunkStore.is_worth`."""
        return self._store.is_worth(saving_s)

    def stage(
        self,
        ticket: str,
        chains: Sequence[ChunkChain],
        *,
        is_prefix: bool = True,
        recompute_s: float | None = None,
        wait_s: float | None = None,
        saving_s: float = 0.0,
    ) -> Staged | None:
        """See `ChunkStore.stage`."""
        with working_for("engine stage", Carried(self._ids.next()), self._tracer, is_server=False):
            return self._store.stage(
                ticket,
                chains,
                is_prefix=is_prefix,
                recompute_s=recompute_s,
                wait_s=wait_s,
                saving_s=saving_s,
            )

    def unstage(self, tickets: Sequence[str]) -> None:
        """See `ChunkStore.unstage`."""
        self._store.unstage(tickets)

    def reserve(self, shapes: Sequence[Sequence[int]], dtype: str) -> list[MemoryObj | None]:
        """See `ChunkStore.reserve`."""
        with working_for(
            "engine reserve", Carried(self._ids.next()), self._tracer, is_server=False
        ):
            return self._store.reserve(shapes, dtype)

    @property
    def needs_digests(self) -> bool:
        """See `ChunkStore.needs_digests`."""
        return self._store.needs_digests

    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `ChunkStore.put`."""
        with working_for("engine put", Carried(self._ids.next()), self._tracer, is_server=False):
            return self._store.put(chunks)

    def get(
        self,
        keys: Sequence[CacheEngineKey],
        recompute_s: float | None = None,
        check_later: bool = False,
    ) -> list[Chunk]:
        """See `ChunkStore.get`."""
        with working_for("engine get", Carried(self._ids.next()), self._tracer, is_server=False):
            return self._store.get(keys, recompute_s, check_later)

    def reject(self, chunk: Chunk) -> None:
        """See `ChunkStore.reject`."""
        self._store.reject(chunk)

    def forget(self, keys: Sequence[CacheEngineKey]) -> None:
        """See `ChunkStore.forget`."""
        self._store.forget(keys)

    def release(self, chunks: Sequence[Chunk]) -> bool:
        """See `ChunkStore.release`."""
        return self._store.release(chunks)

    def abort(self, memories: Sequence[MemoryObj]) -> None:
        """See `ChunkStore.abort`."""
        self._store.abort(memories)

    def stats(self) -> dict[str, dict[str, int]]:
        """See `ChunkStore.stats`."""
        return self._store.stats()
