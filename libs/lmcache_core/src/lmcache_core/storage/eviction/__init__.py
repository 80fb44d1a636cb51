"""What a full tier evicts first, and what a tier refuses even while it has room."""

from __future__ import annotations

import importlib

from lmcache_core.config.registry import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from lmcache_core.errors import ConfigError
from lmcache_core.storage.eviction.base import EvictionPolicy
from lmcache_core.storage.eviction.ledger import Clock, Ledger, TenantQuotas, TierLimits

DEFAULT_POLICY = DEFAULT_EVICTION_POLICY
POLICIES = EVICTION_POLICIES

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Clock",
    "EvictionPolicy",
    "Ledger",
    "TenantQuotas",
    "TierLimits",
    "create_policy",
]


def create_policy(name: str = DEFAULT_POLICY) -> EvictionPolicy:
    """Return a new policy for one tier.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r}: must be one of {', '.join(POLICIES)}")
    module, _, cls = POLICIES[name].partition(":")
    policy = getattr(importlib.import_module(module), cls)()
    assert isinstance(policy, EvictionPolicy)
    return policy
