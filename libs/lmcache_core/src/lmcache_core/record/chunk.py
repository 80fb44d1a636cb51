"""A chunk in memory, and its absence: the values that pass between engine, tiers and transports. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record.header import RecordHeader


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
