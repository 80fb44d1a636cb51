"""Tells lookup which chunks the local tiers hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from lmcache_core.keys import ChunkKey
from lmcache_core.storage.base import OnRemoved


class Reporter(Protocol):
    """Sends events to lookup, in its own time: an `InstanceReporter`."""

    def stored(self, chunk_id: bytes, tier: str, size_bytes: int) -> None:
        """That tier of this instance holds the chunk."""

    def removed(self, chunk_id: bytes, tier: str) -> None:
        """It does so no more."""


class HeldTier(Protocol):
    """A local tier, as far as a full announcement needs it."""

    name: str

    def keys(self) -> list[ChunkKey]:
        """Names of all chunks held now."""


class TierAnnouncer:
    """A `StackListener` that passes on what local tiers gain and lose.

    Made before tiers and reporter; `connect` joins them. Until then, and without a reporter, it says nothing.
    """

    def __init__(self) -> None:
        self._reporter: Reporter | None = None
        self._tiers: dict[str, HeldTier] = {}

    def connect(self, reporter: Reporter, tiers: Sequence[HeldTier]) -> None:
        """From now on pass on what these tiers gain and lose."""
        self._reporter = reporter
        self._tiers = {tier.name: tier for tier in tiers}

    def stored(self, key: ChunkKey, tier: str, num_bytes: int) -> None:
        """See `StackListener.stored`; tiers that are not local are not announced."""
        if self._reporter is not None and tier in self._tiers:
            self._reporter.stored(key.key.chunk_id(), tier, num_bytes)

    def removed_from(self, tier: str) -> OnRemoved:
        """What that tier is to call with every key that it gives up."""

        def removed(key: ChunkKey) -> None:
            if self._reporter is not None:
                self._reporter.removed(key.key.chunk_id(), tier)

        return removed

    def held(self) -> Iterator[tuple[bytes, str]]:
        """Chunk id and tier of everything held now, for a full announcement."""
        for tier in self._tiers.values():
            for key in tier.keys():
                yield key.key.chunk_id(), tier.name
