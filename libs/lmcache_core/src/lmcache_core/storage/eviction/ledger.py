"""The books of a tier: the order, age and tenant of its chunks, and why others are gone."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lmcache_core._typing import override
from lmcache_core.errors import ConfigError, IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Miss, MissReason
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


MAX_RECENT_EVICTIONS = 16384
Clock = Callable[[], float]
"""Seconds since the epoch; a chunk's age must survive a restart."""


@dataclass(frozen=True)
class TierLimits:
    """What a tier does not keep although it has room.

    Attributes:
        ttl_s: How long a chunk is served after it was stored, seconds; None: for ever.
        quotas: What tenants may take; None: as much as there is.

    Raises:
        ConfigError: `ttl_s` is not positive.
    """

    ttl_s: float | None = None
    quotas: TenantQuotas | None = None

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl_s={self.ttl_s}: it must be positive, or none")


class Expiry:
    """Knows when each chunk of a tier expires. Every call is O(1), amortised. Not thread-safe: its
    tier locks.

    All chunks live equally long, so that they end in the order in which they were stored. A chunk
    that comes from another tier brings its age with it and may end before those in front of it: it
    is never served too long, but found by `past` only after them. A chunk that was stored while the
    clock was ahead counts as stored when it is next looked at.

    Args:
        ttl_s: How long a chunk is served after it was stored, seconds.
        clock: Tells the time.
    """

    def __init__(self, ttl_s: float, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._ends: OrderedDict[ChunkKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, key: ChunkKey, stored_at: float | None) -> None:
        """A chunk is held.

        Args:
            key: Its name, which is not known yet.
            stored_at: When it was stored; None, or a time to come (a clock was set back), means
                now.
        """
        assert key not in self._ends, "a key is added once"
        now = self._clock()
        self._ends[key] = (now if stored_at is None else min(stored_at, now)) + self._ttl_s

    def remove(self, key: ChunkKey) -> None:
        """That chunk is held no longer."""
        del self._ends[key]

    def is_past(self, key: ChunkKey) -> bool:
        """Whether a held chunk is not to be served any more."""
        now = self._clock()
        return self._end(key, now) <= now

    def past(self, limit: int) -> list[ChunkKey]:
        """Held chunks that are not to be served any more, at most `limit` of them, oldest first."""
        found: list[ChunkKey] = []
        now = self._clock()
        for key in self._ends:
            if self._end(key, now) > now or len(found) == limit:
                break
            found.append(key)
        return found

    def _end(self, key: ChunkKey, now: float) -> float:
        """When a held chunk ends; never further off than for one that is stored now."""
        end = self._ends[key] = min(self._ends[key], now + self._ttl_s)
        return end


class RecentEvictions:
    """A bounded set of the keys given up last, each with the reason, which tells "evicted" and
    "expired" from "never stored". The oldest are forgotten first. Not thread-safe: its tier locks.
    """

    def __init__(self) -> None:
        self._reasons: OrderedDict[ChunkKey, MissReason] = OrderedDict()

    def add(self, key: ChunkKey, reason: MissReason = MissReason.EVICTED) -> None:
        """That chunk has just gone."""
        self._reasons[key] = reason
        if len(self._reasons) > MAX_RECENT_EVICTIONS:
            self._reasons.popitem(last=False)

    def discard(self, key: ChunkKey) -> None:
        """That chunk is held again."""
        self._reasons.pop(key, None)

    def miss(self, key: ChunkKey) -> Miss:
        """The miss to report for a chunk that is not held: evicted or expired, as far as
        remembered, or never stored.
        """
        return Miss(self._reasons.get(key, MissReason.NEVER_STORED))


class Ledger:
    """The books of one tier. Not thread-safe: the tier calls it under its own lock. Every call is
    O(1), amortised.

    Args:
        policy: Which chunks go first; belongs to this ledger.
        limits: What is not kept; by default everything is.
        clock: Tells the time.

    Attributes:
        has_ttl: Whether chunks ever expire.
    """

    def __init__(
        self, policy: EvictionPolicy, limits: TierLimits | None = None, clock: Clock = time.time
    ) -> None:
        limits = limits or TierLimits()
        self._quotas = limits.quotas
        self._tenants = None if limits.quotas is None else TenantPolicy(policy)
        self._policy: EvictionPolicy = policy if self._tenants is None else self._tenants
        self._expiry = None if limits.ttl_s is None else Expiry(limits.ttl_s, clock)
        self.has_ttl = self._expiry is not None
        self._recent = RecentEvictions()
        self._num_evicted = 0
        self._num_expired = 0
        self._num_over_quota = 0

    def add(self, key: ChunkKey, num_bytes: int, stored_at: float | None = None) -> None:
        """The tier now holds that chunk.

        Args:
            key: Not known yet.
            num_bytes: What it takes of the capacity.
            stored_at: When it was stored, seconds since the epoch; None means now.
        """
        self._policy.on_insert(key, num_bytes)
        if self._expiry is not None:
            self._expiry.add(key, stored_at)
        self._recent.discard(key)

    def access(self, key: ChunkKey) -> None:
        """A held chunk was read."""
        self._policy.on_access(key)

    def remove(self, key: ChunkKey) -> None:
        """The tier gave a held chunk up on request."""
        self._policy.on_remove(key)
        if self._expiry is not None:
            self._expiry.remove(key)

    def evict(self, key: ChunkKey) -> None:
        """The tier gave a held chunk up to make room."""
        self.remove(key)
        self._recent.add(key, MissReason.EVICTED)
        self._num_evicted += 1

    def expire(self, key: ChunkKey) -> None:
        """The tier gave a held chunk up because its time is over."""
        self.remove(key)
        self._recent.add(key, MissReason.EXPIRED)
        self._num_expired += 1

    def is_live(self, key: ChunkKey) -> bool:
        """Whether a held chunk may still be served."""
        return self._expiry is None or not self._expiry.is_past(key)

    def past(self, limit: int) -> list[ChunkKey]:
        """Held chunks whose time is over, at most `limit` of them, oldest first."""
        return [] if self._expiry is None else self._expiry.past(limit)

    def victims(self, tenant: str | None = None) -> Iterator[ChunkKey]:
        """See `EvictionPolicy.victims`; with quotas, those of one tenant if it is named."""
        if tenant is None or self._tenants is None:
            return self._policy.victims()
        return self._tenants.victims_of(tenant)

    def coldest_first(self) -> list[ChunkKey]:
        """See `EvictionPolicy.coldest_first`."""
        return self._policy.coldest_first()

    def quota(self, tenant: str) -> int | None:
        """Bytes that this tenant may take, None for as much as there is."""
        return None if self._quotas is None else self._quotas.of(tenant)

    def is_over_quota(self, tenant: str, more_bytes: int = 0) -> bool:
        """Whether that tenant's chunks would take more than its quota with so many bytes more."""
        quota = self.quota(tenant)
        return (
            quota is not None
            and self._tenants is not None
            and self._tenants.used_bytes(tenant) + more_bytes > quota
        )

    def refuse(self) -> None:
        """A chunk was not kept because of its tenant's quota."""
        self._num_over_quota += 1

    def miss(self, key: ChunkKey) -> Miss:
        """The miss to report for a chunk that is not held."""
        return self._recent.miss(key)

    def stats(self) -> dict[str, int]:
        """What has happened so far."""
        return {
            "evicted_chunks": self._num_evicted,
            "expired_chunks": self._num_expired,
            "quota_refused_chunks": self._num_over_quota,
        }

    def check_integrity(self, sizes: Mapping[ChunkKey, int]) -> None:
        """Compare these books with the tier's own.

        Args:
            sizes: What each chunk that the tier holds takes of its capacity.

        Raises:
            IntegrityError: They do not balance.
        """
        if len(self._policy) != len(sizes):
            raise IntegrityError(f"{len(sizes)} chunks, but the policy knows {len(self._policy)}")
        if self._expiry is not None and len(self._expiry) != len(sizes):
            raise IntegrityError(
                f"{len(sizes)} chunks, but the time of {len(self._expiry)} is known"
            )
        if self._tenants is None:
            return
        used: dict[str, int] = {}
        for key, num_bytes in sizes.items():
            used[key.tenant] = used.get(key.tenant, 0) + num_bytes
        for tenant, num_bytes in used.items():
            if self._tenants.used_bytes(tenant) != num_bytes:
                raise IntegrityError(
                    f"a tenant's chunks take {num_bytes} bytes, its books say"
                    f" {self._tenants.used_bytes(tenant)}"
                )
