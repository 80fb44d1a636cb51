"""The accounting of a tier: order, age and tenant of its chunks, and why others are gone."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import MappingProxyType

from lmcache_core.errors import ConfigError, IntegrityError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Miss, MissReason
from lmcache_core.storage.eviction.base import EvictionPolicy
from lmcache_core.storage.eviction.tails import TailsFirst


@dataclass(frozen=True)
class TenantQuotas:
    """Hard limits on how much of one tier each tenant's chunks take.

    Attributes:
        default_bytes: Quota of tenants that are not named; None: unlimited.
        by_tenant: Quotas of the tenants named, in bytes.

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
        """Return the quota of this tenant in bytes; None if unlimited."""
        return self.by_tenant.get(tenant, self.default_bytes)


MAX_RECENT_EVICTIONS = 16384
Clock = Callable[[], float]
"""Seconds since the epoch; a chunk's age must survive a restart."""


@dataclass(frozen=True)
class TierLimits:
    """Limits on what a tier stores even while it has room.

    Attributes:
        ttl_s: How long a chunk is served after it was stored, seconds; None: forever.
        quotas: Quotas of tenants; None: unlimited.

    Raises:
        ConfigError: `ttl_s` is not positive.
    """

    ttl_s: float | None = None
    quotas: TenantQuotas | None = None

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl_s={self.ttl_s}: it must be positive, or none")


class RecentEvictions:
    """A bounded set of recently dropped keys with their reasons, which distinguishes "evicted" and
    "expired" from "never stored". The oldest are forgotten first. Not thread-safe: its tier locks.
    """

    def __init__(self) -> None:
        self._reasons: OrderedDict[ChunkKey, MissReason] = OrderedDict()

    def add(self, key: ChunkKey, reason: MissReason = MissReason.EVICTED) -> None:
        """Remember why a chunk has just been dropped."""
        self._reasons[key] = reason
        if len(self._reasons) > MAX_RECENT_EVICTIONS:
            self._reasons.popitem(last=False)

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk that is held again."""
        self._reasons.pop(key, None)

    def miss(self, key: ChunkKey) -> Miss:
        """Return the miss to report for a chunk that is not held: evicted or expired if remembered,
        else never stored.
        """
        return Miss(self._reasons.get(key, MissReason.NEVER_STORED))


@dataclass
class _Share:
    """The chunks of one tenant.

    Attributes:
        policy: Eviction order among them, used when the tenant exceeds its quota.
    """

    policy: TailsFirst
    used_bytes: int = 0


class Ledger:
    """The accounting of one tier. Not thread-safe: the tier calls it under its own lock. Every call
    is O(1), amortised.

    With quotas, each tenant has one more policy of the same kind, for making room within its quota.
    So a full tier evicts the same chunks with quotas as without, and what a tenant stores beyond
    its quota costs only its own chunks.

    All chunks have the same lifetime, so they expire in the order in which they were stored. A
    chunk from another tier keeps its age and may expire before those ahead of it: it is never
    served too long, but `past` reports it only after them. A chunk stored while the clock was ahead
    counts as stored when it is next examined.

    Args:
        policy: Eviction order; must not be shared with another ledger.
        clock: Seconds since the epoch.
    """

    def __init__(
        self, policy: EvictionPolicy, limits: TierLimits | None = None, clock: Clock = time.time
    ) -> None:
        limits = limits or TierLimits()
        self._policy = TailsFirst(policy)
        self._clock = clock
        self._quotas = limits.quotas
        self._shares: dict[str, _Share] = {}
        self._ttl_s = math.inf if limits.ttl_s is None else limits.ttl_s
        self._ends: OrderedDict[ChunkKey, float] = OrderedDict()
        self._recent = RecentEvictions()
        self._num_gone = dict.fromkeys((MissReason.EVICTED, MissReason.EXPIRED), 0)
        self._num_over_quota = 0
        self.used_bytes = 0
        self.has_ttl = limits.ttl_s is not None

    def add(self, key: ChunkKey, num_bytes: int, stored_at: float | None = None) -> None:
        """Record that the tier now holds a chunk.

        Args:
            key: A key that is not known yet.
            num_bytes: How much of the capacity it takes.
            stored_at: When it was stored, seconds since the epoch; None, or a time in the future
                (the clock was set back), means now.
        """
        self._policy.on_insert(key, num_bytes)
        self.used_bytes += num_bytes
        if self._quotas is not None:
            share = self._shares.get(key.tenant)
            if share is None:
                share = self._shares[key.tenant] = _Share(self._policy.like())
            share.policy.on_insert(key, num_bytes)
            share.used_bytes += num_bytes
        if self.has_ttl:
            now = self._clock()
            self._ends[key] = (now if stored_at is None else min(stored_at, now)) + self._ttl_s
        self._recent.discard(key)

    def access(self, key: ChunkKey) -> None:
        """Record that a held chunk was read."""
        self._policy.on_access(key)
        if self._quotas is not None:
            self._shares[key.tenant].policy.on_access(key)

    def remove(self, key: ChunkKey, num_bytes: int, reason: MissReason | None = None) -> None:
        """Record that the tier dropped a held chunk. A tenant without chunks is forgotten.

        Args:
            num_bytes: As passed to `add`.
            reason: `EVICTED` to make room, `EXPIRED` at the end of its lifetime; None: on request.
        """
        self._policy.on_remove(key)
        self.used_bytes -= num_bytes
        if self._quotas is not None:
            share = self._shares[key.tenant]
            share.policy.on_remove(key)
            share.used_bytes -= num_bytes
            if not len(share.policy):
                del self._shares[key.tenant]
        if self.has_ttl:
            del self._ends[key]
        if reason is not None:
            self._recent.add(key, reason)
            self._num_gone[reason] += 1

    def is_live(self, key: ChunkKey) -> bool:
        """Return whether a held chunk may still be served."""
        if not self.has_ttl:
            return True
        now = self._clock()
        return self._end(key, now) > now

    def past(self, limit: int) -> list[ChunkKey]:
        """Return expired chunks that are still held, at most `limit` of them, oldest first."""
        now = self._clock()
        return list(islice(takewhile(lambda key: self._end(key, now) <= now, self._ends), limit))

    def victims(self, tenant: str | None = None) -> Iterator[ChunkKey]:
        """See `EvictionPolicy.victims`; with quotas, those of one tenant if named."""
        if tenant is None or self._quotas is None:
            return self._policy.victims()
        share = self._shares.get(tenant)
        return iter(()) if share is None else share.policy.victims()

    def coldest_first(self) -> list[ChunkKey]:
        """See `EvictionPolicy.coldest_first`."""
        return self._policy.coldest_first()

    @property
    def oldest_tail(self) -> ChunkKey | None:
        """See `TailsFirst.oldest_tail`."""
        return self._policy.oldest_tail

    @property
    def tail_bytes(self) -> int:
        """See `TailsFirst.tail_bytes`."""
        return self._policy.tail_bytes

    def quota(self, tenant: str) -> int | None:
        """Return the quota of this tenant in bytes; None if unlimited."""
        return None if self._quotas is None else self._quotas.of(tenant)

    def is_over_quota(self, tenant: str, more_bytes: int = 0) -> bool:
        """Return whether `more_bytes` more would take that tenant's chunks over its quota."""
        quota = self.quota(tenant)
        share = self._shares.get(tenant)
        used_bytes = 0 if share is None else share.used_bytes
        return quota is not None and used_bytes + more_bytes > quota

    def refuse(self) -> None:
        """Count a chunk that was refused because of its tenant's quota."""
        self._num_over_quota += 1

    def miss(self, key: ChunkKey) -> Miss:
        """Return the miss to report for a chunk that is not held."""
        return self._recent.miss(key)

    def stats(self) -> dict[str, int]:
        """Return counters."""
        return {
            "evicted_chunks": self._num_gone[MissReason.EVICTED],
            "expired_chunks": self._num_gone[MissReason.EXPIRED],
            "quota_refused_chunks": self._num_over_quota,
        }

    def check_integrity(self, sizes: Mapping[ChunkKey, int]) -> None:
        """Compare this accounting with the tier's own.

        Args:
            sizes: How much of the capacity each chunk of the tier takes.

        Raises:
            IntegrityError: They disagree.
        """
        if sum(sizes.values()) != self.used_bytes:
            raise IntegrityError(
                f"chunks hold {sum(sizes.values())} bytes, books say {self.used_bytes}"
            )
        if len(self._policy) != len(sizes):
            raise IntegrityError(f"{len(sizes)} chunks, but the policy knows {len(self._policy)}")
        if self.has_ttl and len(self._ends) != len(sizes):
            raise IntegrityError(f"{len(sizes)} chunks, but the time of {len(self._ends)} is known")
        if self._quotas is None:
            return
        used: dict[str, int] = {}
        for key, num_bytes in sizes.items():
            used[key.tenant] = used.get(key.tenant, 0) + num_bytes
        booked = {tenant: share.used_bytes for tenant, share in self._shares.items()}
        if used != booked:
            raise IntegrityError(
                f"tenants' chunks take {sorted(used.values())} bytes, their books say"
                f" {sorted(booked.values())}"
            )

    def _end(self, key: ChunkKey, now: float) -> float:
        """Return when a held chunk expires; never later than one stored now would."""
        end = self._ends[key] = min(self._ends[key], now + self._ttl_s)
        return end
