"""A chunk store whose calls are traced: where a trace begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core._typing import override
from lmcache_core.keys import CacheEngineKey, ChunkChain
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Staged
from lmcache_core.record.chunk_store import ChunkStore
from lmcache_core.telemetry.request_context import Carried, RequestIds, Tracer, working_for


class TracedChunkStore(ChunkStore):
    """Wraps a chunk store; each call that may reach a tier is a span, and has an id for the logs of
    all that work for it.

    Args:
        store: Is wrapped.
        tracer: Takes the spans; closed with the store.
    """

    def __init__(self, store: ChunkStore, tracer: Tracer) -> None:
        self._store = store
        self._tracer = tracer
        self._ids = RequestIds()

    @override
    def open(self, on_salt: Callable[[str], None]) -> None:
        self._store.open(on_salt)

    @override
    def close(self) -> None:
        try:
            self._store.close()
        finally:
            self._tracer.close()

    @override
    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        with working_for("engine lookup", Carried(self._ids.next()), self._tracer, is_server=False):
            return self._store.lookup(keys, search_range)

    @override
    def prefetch(self, keys: Sequence[CacheEngineKey]) -> None:
        with working_for(
            "engine prefetch", Carried(self._ids.next()), self._tracer, is_server=False
        ):
            self._store.prefetch(keys)

    @override
    def is_worth(self, saving_s: float) -> bool:
        return self._store.is_worth(saving_s)

    @override
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
        with working_for("engine stage", Carried(self._ids.next()), self._tracer, is_server=False):
            return self._store.stage(
                ticket,
                chains,
                is_prefix=is_prefix,
                recompute_s=recompute_s,
                wait_s=wait_s,
                saving_s=saving_s,
            )

    @override
    def unstage(self, tickets: Sequence[str]) -> None:
        self._store.unstage(tickets)

    @override
    def reserve(self, shapes: Sequence[Sequence[int]], dtype: str) -> list[MemoryObj | None]:
        with working_for(
            "engine reserve", Carried(self._ids.next()), self._tracer, is_server=False
        ):
            return self._store.reserve(shapes, dtype)

    @property
    @override
    def needs_digests(self) -> bool:
        return self._store.needs_digests

    @override
    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        with working_for("engine put", Carried(self._ids.next()), self._tracer, is_server=False):
            return self._store.put(chunks)

    @override
    def get(
        self,
        keys: Sequence[CacheEngineKey],
        recompute_s: float | None = None,
        check_later: bool = False,
    ) -> list[Chunk]:
        with working_for("engine get", Carried(self._ids.next()), self._tracer, is_server=False):
            return self._store.get(keys, recompute_s, check_later)

    @override
    def reject(self, chunk: Chunk) -> None:
        self._store.reject(chunk)

    @override
    def forget(self, keys: Sequence[CacheEngineKey]) -> None:
        self._store.forget(keys)

    @override
    def release(self, chunks: Sequence[Chunk]) -> bool:
        return self._store.release(chunks)

    @override
    def abort(self, memories: Sequence[MemoryObj]) -> None:
        self._store.abort(memories)

    @override
    def stats(self) -> dict[str, dict[str, int]]:
        return self._store.stats()
