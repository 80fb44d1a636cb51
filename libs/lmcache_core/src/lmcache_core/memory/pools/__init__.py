"""Pools of equal slots, one for a chunk. Needs torch."""

from lmcache_core.memory.pools.base import BasePool, KVObj
from lmcache_core.memory.pools.local import (
    LocalCPUBufferPool,
    LocalCPUPool,
    LocalGPUPool,
    LocalPool,
)

__all__ = ["BasePool", "KVObj", "LocalCPUBufferPool", "LocalCPUPool", "LocalGPUPool", "LocalPool"]
