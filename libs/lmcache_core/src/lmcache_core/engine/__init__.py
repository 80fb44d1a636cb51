"""The cache engine: what a serving engine calls. Needs torch."""

from lmcache_core.extras import needs_extra

with needs_extra("torch"):
    from lmcache_core.engine.engine import LMCacheEngine, LMCacheEngineBuilder
    from lmcache_core.record.chunk_store import ChunkStore

__all__ = ["ChunkStore", "LMCacheEngine", "LMCacheEngineBuilder"]
