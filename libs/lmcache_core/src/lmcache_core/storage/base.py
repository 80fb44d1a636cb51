"""The interface of a tier, and the values that pass through it. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import RecordHeader


class MissReason(StrEnum):
    """Why a chunk was not served. Every miss is counted under one of these."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    EXPIRED = "expired"
    LAYOUT = "layout"
    IDENTITY = "identity"
    CORRUPT = "corrupt"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    BREAKER_OPEN = "breaker_open"
    NO_MEMORY = "no_memory"


@dataclass(frozen=True, slots=True)
class Miss:
    """A chunk that is not served: a value, not a failure."""

    reason: MissReason


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk in memory. Whoever receives one owns a reference on `memory` and gives it back with `release`.

    Attributes:
        key: Its name.
        header: The parsed head of its record.
        head: The head's bytes, as they go to a file or a socket.
        memory: Its payload, `byte_array` of exactly the record's payload length.
        tier: Name of the tier that it came from.
    """

    key: ChunkKey
    header: RecordHeader
    head: bytes
    memory: MemoryObj
    tier: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole record."""
        return len(self.head) + self.memory.get_size()

    def release(self) -> None:
        """Give this chunk's reference back."""
        self.memory.ref_count_down()


class Allocate(Protocol):
    """Where a tier puts what it reads: arena memory, by eviction if need be."""

    def __call__(self, num_bytes: int) -> MemoryObj | None:
        """Memory for that many bytes, one reference owned by the caller; None when there is no room."""


Result = Chunk | Miss
OnRemoved = Callable[[ChunkKey], None]


class StorageBackend(ABC):
    """One tier. Every call is batched; results stand in the order of the keys.

    A call never raises for a chunk that is missing, damaged or does not fit: those are values. It raises `UnavailableError` when
    the whole tier cannot be reached. Cancellation is safe at any await: memory allocated so far is given back.
    """

    name: str

    @abstractmethod
    async def open(self) -> None:
        """Do the I/O that the constructor must not do. Raises `UnavailableError` or `ConfigError`."""

    @abstractmethod
    async def close(self) -> None:
        """Stop background work and join it. Idempotent."""

    @abstractmethod
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of them a `batched_get` would find now."""

    @abstractmethod
    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Result]:
        """Read chunks, each verified (key, head, digest). The caller owns every chunk returned."""

    @abstractmethod
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Keep chunks (borrowed: a backend that keeps the memory takes its own reference). True: kept, or was there already.

        When it returns, what is True is visible to `batched_contains` and complete.
        """

    @abstractmethod
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; the number that were there."""

    @abstractmethod
    async def clear(self, tenant: str | None = None) -> int:
        """Forget everything (of that tenant); the number of chunks."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Figures for status pages: `num_chunks`, `used_bytes`, `capacity_bytes` and what else the tier counts."""


class ListsKeys(Protocol):
    """Ability: a tier that knows what it holds."""

    def keys(self) -> list[ChunkKey]:
        """Names of all chunks held now."""
