"""The books of a tier: the order, age and tenant of its chunks, and why others are gone."""

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
        """Return the bytes that this tenant may take, None for as much as there is."""
        return self.by_tenant.get(tenant, self.default_bytes)


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


class RecentEvictions:
    """A bounded set of the keys given up last, each with the reason, which tells "evicted" and
    "expired" from "never stored". The oldest are forgotten first. Not thread-safe: its tier locks.
    """

    def __init__(self) -> None:
        self._reasons: OrderedDict[ChunkKey, MissReason] = OrderedDict()

    def add(self, key: ChunkKey, reason: MissReason = MissReason.EVICTED) -> None:
        """Remember why a chunk has just gone."""
        self._reasons[key] = reason
        if len(self._reasons) > MAX_RECENT_EVICTIONS:
            self._reasons.popitem(last=False)

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk that is held again."""
        self._reasons.pop(key, None)

    def miss(self, key: ChunkKey) -> Miss:
        """Return the miss to report for a chunk that is not held: evicted or expired, as far as
        remembered, or never stored.
        """
        return Miss(self._reasons.get(key, MissReason.NEVER_STORED))


@dataclass
class _Share:
    """What one tenant holds.

    Attributes:
        policy: Its chunks, in the order in which it gives them up for itself.
        used_bytes: What they take.
    """

    policy: EvictionPolicy
    used_bytes: int = 0


class Ledger:
    """The books of one tier. Not thread-safe: the tier calls it under its own lock. Every call is
    O(1), amortised.

    With quotas there is one more policy of the same kind for each tenant, for when that tenant has
    to make room for itself. A full tier therefore gives up the same chunks with quotas as without;
    what a tenant stores beyond its quota only ever costs its own.

    All chunks live equally long, so that they end in the order in which they were stored. A chunk
    that comes from another tier brings its age with it and may end before those in front of it: it
    is never served too long, but found by `past` only after them. A chunk that was stored while the
    clock was ahead counts as stored when it is next looked at.

    Args:
        policy: Which chunks go first; belongs to this ledger.
        limits: What is not kept; by default everything is.
        clock: Tells the time.

    Attributes:
        used_bytes: What all held chunks take.
        has_ttl: Whether chunks ever expire.
    """

    def __init__(
        self, policy: EvictionPolicy, limits: TierLimits | None = None, clock: Clock = time.time
    ) -> None:
        limits = limits or TierLimits()
        self._policy = policy
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
        """Note that the tier now holds a chunk.

        Args:
            key: Not known yet.
            num_bytes: What it takes of the capacity.
            stored_at: When it was stored, seconds since the epoch; None, or a time to come (a clock
                was set back), means now.
        """
        self._policy.on_insert(key, num_bytes)
        self.used_bytes += num_bytes
        if self._quotas is not None:
            share = self._shares.get(key.tenant)
            if share is None:
                share = self._shares[key.tenant] = _Share(type(self._policy)())
            share.policy.on_insert(key, num_bytes)
            share.used_bytes += num_bytes
        if self.has_ttl:
            now = self._clock()
            self._ends[key] = (now if stored_at is None else min(stored_at, now)) + self._ttl_s
        self._recent.discard(key)

    def access(self, key: ChunkKey) -> None:
        """Note that a held chunk was read."""
        self._policy.on_access(key)
        if self._quotas is not None:
            self._shares[key.tenant].policy.on_access(key)

    def remove(self, key: ChunkKey, num_bytes: int, reason: MissReason | None = None) -> None:
        """Note that the tier gave a held chunk up. A tenant that holds nothing is forgotten.

        Args:
            key: Its name.
            num_bytes: As it was added.
            reason: `EVICTED` to make room, `EXPIRED` if its time is over; None: on request.
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
        """Return held chunks whose time is over, at most `limit` of them, oldest first."""
        now = self._clock()
        return list(islice(takewhile(lambda key: self._end(key, now) <= now, self._ends), limit))

    def victims(self, tenant: str | None = None) -> Iterator[ChunkKey]:
        """See `EvictionPolicy.victims`; with quotas, those of one tenant if it is named."""
        if tenant is None or self._quotas is None:
            return self._policy.victims()
        share = self._shares.get(tenant)
        return iter(()) if share is None else share.policy.victims()

    def coldest_first(self) -> list[ChunkKey]:
        """See `EvictionPolicy.coldest_first`."""
        return self._policy.coldest_first()

    def quota(self, tenant: str) -> int | None:
        """Return the bytes that this tenant may take, None for as much as there is."""
        return None if self._quotas is None else self._quotas.of(tenant)

    def is_over_quota(self, tenant: str, more_bytes: int = 0) -> bool:
        """Return whether that tenant's chunks would exceed its quota with so many bytes more."""
        quota = self.quota(tenant)
        share = self._shares.get(tenant)
        used_bytes = 0 if share is None else share.used_bytes
        return quota is not None and used_bytes + more_bytes > quota

    def refuse(self) -> None:
        """Count a chunk that was not kept because of its tenant's quota."""
        self._num_over_quota += 1

    def miss(self, key: ChunkKey) -> Miss:
        """Return the miss to report for a chunk that is not held."""
        return self._recent.miss(key)

    def stats(self) -> dict[str, int]:
        """Return what has happened so far."""
        return {
            "evicted_chunks": self._num_gone[MissReason.EVICTED],
            "expired_chunks": self._num_gone[MissReason.EXPIRED],
            "quota_refused_chunks": self._num_over_quota,
        }

    def check_integrity(self, sizes: Mapping[ChunkKey, int]) -> None:
        """Compare these books with the tier's own.

        Args:
            sizes: What each chunk that the tier holds takes of its capacity.

        Raises:
            IntegrityError: They do not balance.
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
        """Return when a held chunk ends; never later than for one that is stored now."""
        end = self._ends[key] = min(self._ends[key], now + self._ttl_s)
        return end
