"""Bodies of requests to the lookup service: as JSON for people, as MessagePack with raw bytes for
programs.

What both formats say alike is one type. The others come in pairs: `ids` of both gives the chunk ids
as bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from lmcache_core.keys import CHUNK_ID_BYTES
from lmcache_core.lookup import messages
from lmcache_core.lookup.messages import (
    MAX_CHUNKS_PER_LOOKUP,
    MAX_EVENTS_PER_BATCH,
    MAX_EXCLUDED,
    ChunkIdTexts,
    EventOp,
    Incarnation,
    InstanceKind,
    InstanceText,
    SizeBytes,
    StoreEvent,
    TenantText,
    TierText,
    TtlMs,
    chunk_id_text,
)

MSGPACK: Final = "application/vnd.msgpack"
JSON: Final = "application/json"

_ID: Final = struct.Struct(f"{CHUNK_ID_BYTES}s")

PackedIds = Annotated[
    bytes,
    msgspec.Meta(
        max_length=MAX_CHUNKS_PER_LOOKUP * CHUNK_ID_BYTES,
        description="Chunk ids of 16 bytes, one behind the other: MessagePack's bin.",
    ),
]
PackedId = Annotated[
    bytes,
    msgspec.Meta(
        min_length=CHUNK_ID_BYTES,
        max_length=CHUNK_ID_BYTES,
        description="A chunk id: 16 bytes, MessagePack's bin.",
    ),
]
Excluded = Annotated[list[InstanceText], msgspec.Meta(max_length=MAX_EXCLUDED)]


class ChunksRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which chunks, in order, and instances whose holdings do not count."""

    chunk_ids: ChunkIdTexts
    exclude: Excluded = msgspec.field(default_factory=list)

    @property
    def ids(self) -> list[bytes]:
        """Chunk ids, 16 bytes each."""
        return read_ids(self.chunk_ids)


class PackedChunksRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`ChunksRequest` as MessagePack."""

    chunk_ids: PackedIds
    exclude: Excluded = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        _check_packed(self.chunk_ids)

    @property
    def ids(self) -> list[bytes]:
        """Chunk ids, 16 bytes each."""
        return split_ids(self.chunk_ids)


class LeaseRequest(msgspec.Struct, frozen=True):
    """What an instance says of itself; without `ttl_ms` it gets the service's default."""

    incarnation: Incarnation
    kind: InstanceKind
    ttl_ms: TtlMs | None = None


class EventsRequest(msgspec.Struct, frozen=True):
    """Events with consecutive numbers from `first_sequence` on."""

    instance: InstanceText
    incarnation: Incarnation
    first_sequence: messages.Sequence
    events: Annotated[list[StoreEvent], msgspec.Meta(max_length=MAX_EVENTS_PER_BATCH)]

    @property
    def ids(self) -> list[bytes]:
        """The events' chunk ids, 16 bytes each."""
        return read_ids([event.chunk_id for event in self.events])


class PackedEvent(msgspec.Struct, frozen=True, array_like=True):
    """`StoreEvent` as MessagePack: an array."""

    op: EventOp
    chunk_id: PackedId
    tier: TierText
    size_bytes: SizeBytes = 0
    tenant: TenantText | None = None


class PackedEventsRequest(msgspec.Struct, frozen=True):
    """`EventsRequest` as MessagePack."""

    instance: InstanceText
    incarnation: Incarnation
    first_sequence: messages.Sequence
    events: Annotated[list[PackedEvent], msgspec.Meta(max_length=MAX_EVENTS_PER_BATCH)]

    @property
    def ids(self) -> list[bytes]:
        """The events' chunk ids, 16 bytes each."""
        return [event.chunk_id for event in self.events]


class EvictRequest(msgspec.Struct, frozen=True):
    """Which chunks to forget; without `tenant` those of the caller's."""

    chunk_ids: ChunkIdTexts
    tenant: TenantText | None = None

    @property
    def ids(self) -> list[bytes]:
        """Chunk ids, 16 bytes each."""
        return read_ids(self.chunk_ids)


class PackedEvictRequest(msgspec.Struct, frozen=True):
    """`EvictRequest` as MessagePack."""

    chunk_ids: PackedIds
    tenant: TenantText | None = None

    def __post_init__(self) -> None:
        _check_packed(self.chunk_ids)

    @property
    def ids(self) -> list[bytes]:
        """Chunk ids, 16 bytes each."""
        return split_ids(self.chunk_ids)


def read_ids(texts: Sequence[str]) -> list[bytes]:
    """Chunk ids from their hex digits."""
    return split_ids(bytes.fromhex("".join(texts)))


def split_ids(packed: bytes) -> list[bytes]:
    """Chunk ids that lie one behind the other."""
    return [chunk_id for (chunk_id,) in _ID.iter_unpack(packed)]


def pack_ids(chunk_ids: Sequence[bytes]) -> bytes:
    """Chunk ids one behind the other.

    Raises:
        ValueError: One has not 16 bytes.
    """
    for chunk_id in chunk_ids:
        if len(chunk_id) != CHUNK_ID_BYTES:
            chunk_id_text(chunk_id)  # its complaint says which length it has
    return b"".join(chunk_ids)


def packed_events(request: EventsRequest) -> PackedEventsRequest:
    """The same events as MessagePack says them."""
    events = [
        PackedEvent(
            event.op, bytes.fromhex(event.chunk_id), event.tier, event.size_bytes, event.tenant
        )
        for event in request.events
    ]
    return PackedEventsRequest(
        request.instance, request.incarnation, request.first_sequence, events
    )


def _check_packed(packed: bytes) -> None:
    if len(packed) % CHUNK_ID_BYTES:
        raise ValueError(f"{len(packed)} bytes are no list of chunk ids: each has {CHUNK_ID_BYTES}")
