"""The engine's configuration and the description of its KV. No torch at run time: dtypes may be
given by name.

ConfigError
    raised for everything that is unknown, invalid or contradictory; its text names the option, the
    value and the fix, never a secret
"""

from __future__ import annotations

from lmcache_core.config.engine_config import OPTIONS, LMCacheEngineConfig
from lmcache_core.config.metadata import LMCacheEngineMetadata, LMCacheMemPoolMetadata
from lmcache_core.config.options import (
    BLEND_POLICIES,
    DISK_SERDES,
    REMOTE_SERDES,
    VERIFY_HOT_MODES,
    Option,
)
from lmcache_core.config.registry import EVICTION_POLICIES, REMOTE_SCHEMES
from lmcache_core.config.sources import CONFIG_FILE_ENV, ENV_PREFIX, SERVICE_ENV_PREFIXES

__all__ = [
    "BLEND_POLICIES",
    "CONFIG_FILE_ENV",
    "DISK_SERDES",
    "ENV_PREFIX",
    "EVICTION_POLICIES",
    "LMCacheEngineConfig",
    "LMCacheEngineMetadata",
    "LMCacheMemPoolMetadata",
    "OPTIONS",
    "Option",
    "REMOTE_SCHEMES",
    "REMOTE_SERDES",
    "SERVICE_ENV_PREFIXES",
    "VERIFY_HOT_MODES",
]
