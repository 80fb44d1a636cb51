"""The cache engine: what a serving engine calls. Needs torch."""

from lmcache_core.extras import needs_extra

with needs_extra("torch", "torch", "numpy"):
    from lmcache_core.engine.chunk_store import ChunkStore
    from lmcache_core.engine.engine import LMCacheEngine, LMCacheEngineBuilder

__all__ = ["ChunkStore", "LMCacheEngine", "LMCacheEngineBuilder"]
