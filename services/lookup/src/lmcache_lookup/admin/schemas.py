"""Bodies of figures and upkeep."""

from __future__ import annotations

from lmcache_lookup.schemas import AnswerBody, ChunkIds, RequestBody


class StatsBody(AnswerBody):
    """Figures of the caller's tenant; without the index they are missing and `degraded` is set."""

    index: str
    degraded: bool
    num_chunks: int | None
    num_instances: int | None


class EvictBody(RequestBody):
    """Which chunks to forget."""

    chunk_ids: ChunkIds


class EvictedBody(AnswerBody):
    """How many of them were known."""

    num_evicted: int
