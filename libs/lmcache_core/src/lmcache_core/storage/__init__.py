"""Tiers: where chunks are kept."""

from lmcache_core.storage.base import Allocate, Chunk, Miss, MissReason, Result, StorageBackend

__all__ = ["Allocate", "Chunk", "Miss", "MissReason", "Result", "StorageBackend"]
