"""Tiers: where chunks are kept."""

from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend

__all__ = ["Allocate", "Chunk", "Miss", "MissReason", "Result", "StorageBackend"]
