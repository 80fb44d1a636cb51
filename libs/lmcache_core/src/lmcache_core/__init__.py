"""A shared KV cache for LLM serving.

    with lmcache_core.open(model, disk="/var/cache/kv") as cache:
        answer = cache.generate(input_ids, max_new_tokens=64)

Names are imported on first use: importing this package imports no torch.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from lmcache_core.extras import resolve

if TYPE_CHECKING:
    from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
    from lmcache_core.engine import LMCacheEngine, LMCacheEngineBuilder
    from lmcache_core.errors import ConfigError, LMCacheError
    from lmcache_core.gpu_connectors import (
        GPUConnectorInterface,
        VLLMNestedTupleGPUConnector,
        VLLMPagedMemGPUConnector,
        VLLMPagedMemGPUConnectorV2,
    )
    from lmcache_core.integrations.transformers import CachedCausalLM, Generation
    from lmcache_core.integrations.transformers import open as open
    from lmcache_core.keys import CacheEngineKey
    from lmcache_core.memory import (
        HostMemoryAllocator,
        MemoryAllocatorInterface,
        MemoryFormat,
        MemoryObj,
        PinMemoryAllocator,
    )
    from lmcache_core.token_database import ChunkedTokenDatabase, TokenDatabase

__version__ = "0.1.0"

_RESOLVED_LATER = MappingProxyType(
    {
        "CacheEngineKey": "keys",
        "CachedCausalLM": "integrations.transformers",
        "ChunkedTokenDatabase": "token_database",
        "ConfigError": "errors",
        "GPUConnectorInterface": "gpu_connectors",
        "Generation": "integrations.transformers",
        "HostMemoryAllocator": "memory",
        "LMCacheEngine": "engine",
        "LMCacheEngineBuilder": "engine",
        "LMCacheEngineConfig": "config",
        "LMCacheEngineMetadata": "config",
        "LMCacheError": "errors",
        "MemoryAllocatorInterface": "memory",
        "MemoryFormat": "memory",
        "MemoryObj": "memory",
        "PinMemoryAllocator": "memory",
        "TokenDatabase": "token_database",
        "VLLMNestedTupleGPUConnector": "gpu_connectors",
        "VLLMPagedMemGPUConnector": "gpu_connectors",
        "VLLMPagedMemGPUConnectorV2": "gpu_connectors",
        "open": "integrations.transformers",
    }
)

__all__ = [
    "CacheEngineKey",
    "CachedCausalLM",
    "ChunkedTokenDatabase",
    "ConfigError",
    "GPUConnectorInterface",
    "Generation",
    "HostMemoryAllocator",
    "LMCacheEngine",
    "LMCacheEngineBuilder",
    "LMCacheEngineConfig",
    "LMCacheEngineMetadata",
    "LMCacheError",
    "MemoryAllocatorInterface",
    "MemoryFormat",
    "MemoryObj",
    "PinMemoryAllocator",
    "TokenDatabase",
    "VLLMNestedTupleGPUConnector",
    "VLLMPagedMemGPUConnector",
    "VLLMPagedMemGPUConnectorV2",
]
"""Without `open`: a star import must not replace the builtin."""

if not TYPE_CHECKING:  # else a checker would take every name for one of these

    def __getattr__(name):
        return resolve(__name__, _RESOLVED_LATER, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_RESOLVED_LATER})
