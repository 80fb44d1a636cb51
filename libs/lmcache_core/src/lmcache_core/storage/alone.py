"""An engine without peers, as `Neighbours` is one among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.storage.base import OnRemoved, StorageBackend
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.stack import TierStack

if TYPE_CHECKING:
    from lmcache_core.storage.remote import Locate


class Alone:
    """Tells nobody and serves nobody; see `Neighbours` for what the methods do there."""

    def removed_from(self, tier: str) -> OnRemoved | None:
        """Nobody has to know."""
        return None

    @property
    def locate(self) -> Locate | None:
        """There is nobody to ask."""
        return None

    def make_tiers(self) -> list[StorageBackend]:
        """There is nobody to ask."""
        return []

    def make_stack(
        self, hot: LocalCPUBackend, lower: Sequence[StorageBackend], *, keep_hot: bool
    ) -> TierStack:
        """All tiers as one; every new chunk is written to all of them."""
        return TierStack(hot, lower, keep_hot=keep_hot)

    def note_disk(self, disk: StorageBackend) -> None:
        """Nobody has to know."""

    async def open(self, stack: TierStack) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""
