"""Announces to lookup, and to those who follow, which chunks the local tiers hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import Holding, InstanceReporter
from lmcache_core.storage.base import OnRemoved
from lmcache_core.storage.changes import ChangeLog

if TYPE_CHECKING:
    from lmcache_core.storage.disk import DiskBackend
    from lmcache_core.storage.hot import LocalCPUBackend

    LocalTier = LocalCPUBackend | DiskBackend


class TierAnnouncer:
    """A `StackListener` that reports what local tiers gain and lose.

    Construct it before the tiers and the reporter; `connect` joins them. Lookup is told nothing of
    what happens before. All calls belong to one event loop.

    Args:
        own_tenant: Tenant of the token that the reporter shows; chunks of other tenants are
            announced under their names, which needs a token with the role `storage` or `admin`.
        only_own: Announce no chunks of other tenants, which may have had the disk or the arena
            before. Without that role, one of them would keep the others from being announced.

    Attributes:
        changes: Names the own tenant's chunks that have come or gone.
    """

    def __init__(self, own_tenant: str, *, only_own: bool = False) -> None:
        self._own_tenant = own_tenant
        self._only_own = only_own
        self._reporter: InstanceReporter | None = None
        self._tiers: dict[str, LocalTier] = {}
        self.changes = ChangeLog()

    def connect(self, reporter: InstanceReporter, tiers: Sequence[LocalTier]) -> None:
        """Report what these tiers gain and lose from now on."""
        self._reporter = reporter
        self._tiers = {tier.name: tier for tier in tiers}

    def stored(self, key: ChunkKey, tier: str, num_bytes: int) -> None:
        """Report a chunk that a tier has stored; tiers that are not local are ignored."""
        self._note(key)
        if self._reporter is not None and tier in self._tiers and self._is_announced(key):
            if not self._tiers[tier].contains_now([key])[0]:
                # It was evicted before the rest of its batch was written, and its removal has been
                # reported: lookup would name this holder for good.
                return
            self._reporter.stored(key.key.chunk_id(), tier, num_bytes, self._tenant(key))

    def removed_from(self, tier: str) -> OnRemoved:
        """Return the callback that this tier calls with every key it drops."""

        def removed(key: ChunkKey) -> None:
            self._note(key)
            if self._reporter is not None and self._is_announced(key):
                self._reporter.removed(key.key.chunk_id(), tier, self._tenant(key))

        return removed

    def snapshot(self) -> Iterator[Holding]:
        """Yield everything held now, for a full announcement."""
        for tier in self._tiers.values():
            for key, num_bytes in tier.held():
                if self._is_announced(key):
                    yield Holding(key.key.chunk_id(), tier.name, num_bytes, self._tenant(key))

    async def announce_when_loaded(self, tier: DiskBackend) -> None:
        """Announce a tier's chunks once its directory has been read, and again when more become
        readable.

        A large disk is read in the background, and one that is missing at the start is opened
        later.
        """
        tier.on_restored = self._announce_again
        await tier.wait_loaded()
        self._announce_again()

    def _announce_again(self) -> None:
        self.changes.lose()
        if self._reporter is not None:
            self._reporter.announce_again()

    def _note(self, key: ChunkKey) -> None:
        if key.tenant == self._own_tenant:
            self.changes.note(key.key.chunk_hash)

    def _is_announced(self, key: ChunkKey) -> bool:
        return not self._only_own or key.tenant == self._own_tenant

    def _tenant(self, key: ChunkKey) -> str | None:
        return None if key.tenant == self._own_tenant else key.tenant
