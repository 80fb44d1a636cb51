"""The interface of an eviction policy: it orders keys, its tier owns the chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from lmcache_core.keys import ChunkKey


class EvictionPolicy(ABC):
    """Decides which chunks a full tier evicts first. Not thread-safe: the tier calls it under its
    own lock.

    A policy belongs to exactly one tier and is constructed without arguments. Every key is reported
    inserted once and removed once.

    Chunks of one prompt form a chain: without its head the tail is useless. A tier that handles
    several chunks in one call reports the last one first, so that the head counts as the most
    recent and the tail is evicted before it.
    """

    @abstractmethod
    def on_insert(self, key: ChunkKey, num_bytes: int) -> None:
        """Record that the tier now holds a chunk.

        Args:
            key: A key that the policy does not know yet.
            num_bytes: How much of the tier's capacity the chunk takes.
        """

    @abstractmethod
    def on_access(self, key: ChunkKey) -> None:
        """Record that a known chunk was read."""

    @abstractmethod
    def on_remove(self, key: ChunkKey) -> None:
        """Record that the tier dropped a known chunk, by eviction or on request."""

    @abstractmethod
    def victims(self) -> Iterator[ChunkKey]:
        """Yield keys in order of eviction, each at most once, lazily.

        Before requesting the next key, the caller either reports the last one removed or declines
        it; a declined key is in use, which the policy may count as an access. A caller that stops
        iterating has not declined the last key. No other method may be called while the iterator is
        in use.
        """

    @abstractmethod
    def coldest_first(self) -> list[ChunkKey]:
        """Return all known keys, roughly in the order of `victims`: those that were never read
        again come first. Changes nothing.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of keys known now."""
