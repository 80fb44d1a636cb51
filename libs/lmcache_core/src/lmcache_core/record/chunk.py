"""A chunk in memory, and its absence: the values that pass between engine, tiers and transports. No
torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol

import msgspec

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record.codec import encode_head, head_bytes
from lmcache_core.record.header import RecordHeader, payload_digest


class MissReason(StrEnum):
    """Why a chunk was not served. Every miss is counted under one of these reasons."""

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
    ENCODING = "encoding"
    """Lossy where lossless is required, or encoded by a serde that is not open here."""
    PROFILE = "profile"
    """Encoded with an unknown profile or unknown tables."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A chunk that is not served: a value, not a failure."""

    reason: MissReason


class Chunk:
    """A chunk in memory. The receiver owns a reference on `memory` and releases it with `release`.

    Its head either came with it or is built on first use, together with its digest (`unsealed`): a
    chunk that never leaves the process costs neither.

    Args:
        head: The head's bytes, as written to a file or a socket; None: built on first use, with the
            digest.
        memory: Its payload, `byte_array` of exactly the record's payload length. Never changed
            while the chunk lives.
        tier: Name of the tier that it came from.
        stored_at: When that tier stored it, seconds since the epoch; None: unknown, or just now.

    Attributes:
        is_sealed: Whether its digest is known; if not, accessing `header` or `head` reads the whole
            payload.
        is_unchecked: The code that copies the payload must compare its digest (`unchecked`).
    """

    __slots__ = (
        "_head",
        "_header",
        "_seal_lock",
        "is_sealed",
        "is_unchecked",
        "key",
        "memory",
        "stored_at",
        "tier",
    )

    def __init__(
        self,
        key: ChunkKey,
        header: RecordHeader,
        head: bytes | None,
        memory: MemoryObj,
        tier: str,
        stored_at: float | None = None,
    ) -> None:
        self.key = key
        self.memory = memory
        self.tier = tier
        self.stored_at = stored_at
        self.is_sealed = head is not None
        self.is_unchecked = False
        self._header = header
        self._head = head
        self._seal_lock = threading.Lock()

    @classmethod
    def unsealed(cls, key: ChunkKey, header: RecordHeader, memory: MemoryObj, tier: str) -> Chunk:
        """Return a chunk whose digest is computed on first use, which then replaces
        `header.digest`.
        """
        return cls(key, header, None, memory, tier)

    @property
    def header(self) -> RecordHeader:
        """The parsed head of its record, digest included."""
        if not self.is_sealed:
            self.sealed()
        return self._header

    @property
    def head(self) -> bytes:
        """The head's bytes, as written to a file or a socket."""
        if self._head is None:
            self._head = encode_head(self.header, self.memory.get_size())
        return self._head

    @property
    def described(self) -> RecordHeader:
        """The header without computing anything: if the chunk is not sealed, its digest is not
        valid.
        """
        return self._header

    @property
    def lossy(self) -> bool:
        """Whether its encoding is lossy."""
        return self._header.lossy

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole record."""
        head = self._head
        num_head_bytes = head_bytes(self._header) if head is None else len(head)
        return num_head_bytes + self.memory.get_size()

    def sealed(self) -> Chunk:
        """Return this chunk after computing its digest if necessary. Thread-safe; releases the GIL
        while it reads.
        """
        if not self.is_sealed:
            with self._seal_lock:
                if not self.is_sealed:
                    self.sealed_with(payload_digest(self.memory.byte_array))
        return self

    def sealed_with(self, digest: bytes) -> Chunk:
        """Return this chunk, sealed with the digest of its payload, which the caller has
        computed.
        """
        self._header = msgspec.structs.replace(self._header, digest=digest)
        self.is_sealed = True
        return self

    def moved(self, memory: MemoryObj, tier: str) -> Chunk:
        """Return the same chunk in another memory with equal bytes and its own reference,
        attributed to that tier.
        """
        # Read before the header, which another thread that seals this chunk sets first.
        is_sealed, head = self.is_sealed, self._head
        chunk = Chunk(self.key, self._header, head, memory, tier, self.stored_at)
        chunk.is_sealed = is_sealed
        return chunk

    def unchecked(self) -> Chunk:
        """Return this chunk (with its reference), whose digest the copying code checks."""
        chunk = self.moved(self.memory, self.tier)
        chunk.is_unchecked = True
        return chunk

    def release(self) -> None:
        """Release this chunk's reference."""
        self.memory.ref_count_down()


class Allocate(Protocol):
    """Allocates memory for what a tier reads: arena memory, evicting chunks if necessary."""

    def __call__(self, num_bytes: int) -> MemoryObj | None:
        """Return memory for that many bytes, with one reference owned by the caller; None if there
        is no room.
        """


Result = Chunk | Miss


def release_all(results: Iterable[Result | None]) -> None:
    """Release the chunks among results that will not be used."""
    for result in results:
        if isinstance(result, Chunk):
            result.release()


class StagedFrom(IntEnum):
    """Where a staged chunk was found; the values are those of the bytes in `Staged.tiers`."""

    NOWHERE = 0
    """Not held for all ranks, or not promised."""
    HOT = 1
    """It was in host memory."""
    DISK = 2
    PEER = 3
    REMOTE = 4
    OTHER = 5
    """A tier without a number of its own."""


class Staged(NamedTuple):
    """The chunks of chains that are in host memory for all ranks, and stay there until the ticket
    is released.

    Attributes:
        is_ready: Nothing more will come: no lift was needed, or it has ended.
        tiers: For each chain one byte per chunk, a `StagedFrom`; empty while the store has not
            answered.
    """

    is_ready: bool
    tiers: tuple[bytes, ...]
