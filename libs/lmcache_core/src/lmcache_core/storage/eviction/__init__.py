"""Which chunks a full tier gives up first."""

from __future__ import annotations

import importlib
from types import MappingProxyType

from lmcache_core.errors import ConfigError
from lmcache_core.storage.eviction.base import EvictionPolicy
from lmcache_core.storage.eviction.recent import RecentEvictions

DEFAULT_POLICY = "lru"
POLICIES = MappingProxyType({"lru": ("lmcache_core.storage.eviction.lru", "LRUPolicy")})

__all__ = ["DEFAULT_POLICY", "EvictionPolicy", "POLICIES", "RecentEvictions", "create_policy"]


def create_policy(name: str = DEFAULT_POLICY) -> EvictionPolicy:
    """A fresh policy, for one tier.

    Raises:
        ConfigError: No policy has that name.
    """
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r}: must be one of {', '.join(POLICIES)}")
    module, cls = POLICIES[name]
    policy = getattr(importlib.import_module(module), cls)()
    assert isinstance(policy, EvictionPolicy)
    return policy
