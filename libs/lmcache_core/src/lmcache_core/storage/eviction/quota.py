"""What tenants may take of a tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lmcache_core._typing import override
from lmcache_core.errors import ConfigError
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.eviction.base import EvictionPolicy


@dataclass(frozen=True)
class TenantQuotas:
    """Hard caps on what the chunks of one tenant take of one tier.

    Attributes:
        default_bytes: For a tenant without a quota of its own; None: as much as there is.
        by_tenant: Bytes for each of the tenants named.

    Raises:
        ConfigError: A quota is not positive.
    """

    default_bytes: int | None = None
    by_tenant: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for tenant, quota in (("by default", self.default_bytes), *self.by_tenant.items()):
            if quota is not None and quota <= 0:
                raise ConfigError(f"tenant quota {tenant}: {quota} bytes; it must be positive")

    def of(self, tenant: str) -> int | None:
        """Bytes that this tenant may take, None for as much as there is."""
        return self.by_tenant.get(tenant, self.default_bytes)


@dataclass
class _Share:
    """What one tenant holds.

    Attributes:
        policy: Its chunks, in the order in which it gives them up for itself.
        used_bytes: What they take.
    """

    policy: EvictionPolicy
    used_bytes: int = 0


class TenantPolicy(EvictionPolicy):
    """Another policy, over all tenants, and one more of its kind for each tenant, for when that one
    has to make room for itself.

    A full tier therefore gives up the same chunks with quotas as without; what one tenant stores
    beyond its quota only ever costs its own.

    Args:
        policy: Orders all chunks; belongs to this one.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._shares: dict[str, _Share] = {}
        self._sizes: dict[ChunkKey, int] = {}

    @override
    def fresh(self) -> TenantPolicy:
        return TenantPolicy(self._policy.fresh())

    @override
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        self._policy.on_insert(key, num_bytes)
        share = self._shares.get(key.tenant)
        if share is None:
            share = self._shares[key.tenant] = _Share(self._policy.fresh())
        share.policy.on_insert(key, num_bytes)
        share.used_bytes += num_bytes
        self._sizes[key] = num_bytes

    @override
    def on_access(self, key: ChunkKey) -> None:
        self._policy.on_access(key)
        self._shares[key.tenant].policy.on_access(key)

    @override
    def on_remove(self, key: ChunkKey) -> None:
        """Forget a chunk that the tier gave up. A tenant that holds nothing is forgotten."""
        self._policy.on_remove(key)
        share = self._shares[key.tenant]
        share.policy.on_remove(key)
        share.used_bytes -= self._sizes.pop(key)
        if not len(share.policy):
            del self._shares[key.tenant]

    @override
    def victims(self) -> Iterator[ChunkKey]:
        return self._policy.victims()

    def victims_of(self, tenant: str) -> Iterator[ChunkKey]:
        """Like `victims`, but only that tenant's keys, in the order in which it gives them up
        for itself.
        """
        share = self._shares.get(tenant)
        return iter(()) if share is None else share.policy.victims()

    def used_bytes(self, tenant: str) -> int:
        """What that tenant's chunks take."""
        share = self._shares.get(tenant)
        return 0 if share is None else share.used_bytes

    @override
    def coldest_first(self) -> list[ChunkKey]:
        return self._policy.coldest_first()

    def __len__(self) -> int:
        return len(self._policy)
