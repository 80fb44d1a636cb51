"""Tells lookup which chunks the local tiers hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import Holding, InstanceReporter
from lmcache_core.storage.base import OnRemoved

if TYPE_CHECKING:
    from lmcache_core.storage.disk import DiskBackend
    from lmcache_core.storage.hot import LocalCPUBackend

    LocalTier = LocalCPUBackend | DiskBackend


class TierAnnouncer:
    """A `StackListener` that passes on what local tiers gain and lose.

    Made before tiers and reporter; `connect` joins them. Until then it says nothing. All calls
    belong to one event loop.

    Args:
        own_tenant: Tenant of the token that the reporter shows; chunks of other tenants are
            announced under their names, which needs a token with the role `admin`.
    """

    def __init__(self, own_tenant: str) -> None:
        self._own_tenant = own_tenant
        self._reporter: InstanceReporter | None = None
        self._tiers: dict[str, LocalTier] = {}

    def connect(self, reporter: InstanceReporter, tiers: Sequence[LocalTier]) -> None:
        """Pass on what these tiers gain and lose from now on."""
        self._reporter = reporter
        self._tiers = {tier.name: tier for tier in tiers}

    def stored(self, key: ChunkKey, tier: str, num_bytes: int) -> None:
        """Announce what a tier has kept; tiers that are not local are not announced."""
        if self._reporter is not None and tier in self._tiers:
            self._reporter.stored(key.key.chunk_id(), tier, num_bytes, self._tenant(key))

    def removed_from(self, tier: str) -> OnRemoved:
        """Return what that tier is to call with every key that it gives up."""

        def removed(key: ChunkKey) -> None:
            if self._reporter is not None:
                self._reporter.removed(key.key.chunk_id(), tier, self._tenant(key))

        return removed

    def snapshot(self) -> Iterator[Holding]:
        """Yield everything held now, for a full announcement."""
        for tier in self._tiers.values():
            for key, num_bytes in tier.held():
                yield Holding(key.key.chunk_id(), tier.name, num_bytes, self._tenant(key))

    async def announce_when_loaded(self, tier: DiskBackend) -> None:
        """Announce what a tier finds once it has been read, and whenever it can read more later.

        A large disk is read in the background, and one that is not there at the start is opened
        later.
        """
        reporter = self._reporter
        if reporter is not None:
            tier.on_restored = reporter.announce_again
            await tier.wait_loaded()
            reporter.announce_again()

    def _tenant(self, key: ChunkKey) -> str | None:
        return None if key.tenant == self._own_tenant else key.tenant
