"""The interface of an eviction policy: it orders keys, its tier owns the chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from lmcache_core.keys import ChunkKey


class EvictionPolicy(ABC):
    """Decides which chunks a full tier gives up first. Not thread-safe: the tier calls it under its
    own lock.

    A policy belongs to exactly one tier and is made without arguments. Every key is reported
    inserted once and removed once.

    Chunks of one prompt form a chain: without its head the tail is of no use. Where a tier learns
    of several chunks at once, it reports the last one first, so that the head counts as the most
    recent and the tail goes before it.
    """

    @abstractmethod
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        """Note that the tier now holds a chunk.

        Args:
            key: A key that the policy does not know yet.
            num_bytes: What the chunk takes of the tier's capacity.
        """

    @abstractmethod
    def on_access(self, key: ChunkKey) -> None:
        """Note that a known chunk was read."""

    @abstractmethod
    def on_remove(self, key: ChunkKey) -> None:
        """Note that the tier gave a known chunk up, by eviction or on request."""

    @abstractmethod
    def victims(self) -> Iterator[ChunkKey]:
        """Yield keys in the order in which to give them up, each at most once, lazily.

        Before it asks for the next key the caller either reports the last one removed or declines
        it; a declined key is in use, which the policy may count as an access. A caller that asks no
        more has not declined the last one. Nothing else may be reported while the iterator is in
        use.
        """

    @abstractmethod
    def coldest_first(self) -> list[ChunkKey]:
        """Return all known keys, roughly in the order of `victims`: those that were never read
        again before the others. Changes nothing.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of keys known now."""
