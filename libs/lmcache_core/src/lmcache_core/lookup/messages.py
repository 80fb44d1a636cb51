"""Messages of the lookup service (`docs/protocols.md`, lookup).

Client and service read and write these types, and the service's OpenAPI document is generated from
them. What instances send and ask is MessagePack with raw bytes; the questions can be asked in JSON,
too, by people and request routers, and everything else is JSON. A message with the same form in
both is one type. The others come in pairs.

The document takes what a field means from the docstring of its class, or else from its type.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from lmcache_core.keys import CHUNK_ID_BYTES
from lmcache_core.names import INSTANCE_PATTERN, KNOWN_TIERS, TENANT_PATTERN

MSGPACK: Final = "application/vnd.msgpack"
JSON: Final = "application/json"

InstanceKind = Annotated[
    Literal["sidecar", "storage"],
    msgspec.Meta(description="The sidecar of a pod, or a storage server."),
]
EventOp = Annotated[
    Literal["store", "remove"],
    msgspec.Meta(description="Whether the tier has the chunk from now on, or no longer."),
]

MAX_CHUNKS_PER_LOOKUP: Final = 8192
MAX_HOLDERS_PER_CHUNK: Final = 16
MAX_INSTANCES_PER_ANSWER: Final = 4096
MAX_EVENTS_PER_BATCH: Final = 2048
MAX_EXCLUDED: Final = 1024
MAX_LOCATIONS: Final = 64
MAX_LEASES: Final = 65_536
MAX_TENANTS_PER_ANSWER: Final = 1024
MAX_INCARNATION: Final = (1 << 63) - 1
MAX_SEQUENCE: Final = (1 << 53) - 1
MAX_SIZE_BYTES: Final = 1 << 40
MAX_TTL_MS: Final = 1 << 40
TIER_PATTERN: Final = r"[A-Za-z][A-Za-z0-9_-]{0,31}"
NO_LINE_END: Final = r"(?!\n)"
"""Ends our patterns: Python's `$` also matches before a final newline. JSON Schema's does not, so
the OpenAPI document omits it.
"""

_TIER = re.compile(TIER_PATTERN)
_ID: Final = struct.Struct(f"{CHUNK_ID_BYTES}s")

ChunkIdText = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[0-9a-f]{32}$",
        min_length=32,
        max_length=32,
        description="A chunk id: 32 hex digits.",
    ),
]
ChunkIdTexts = Annotated[
    list[ChunkIdText],
    msgspec.Meta(
        max_length=MAX_CHUNKS_PER_LOOKUP,
        description="Chunk ids; for a prefix in the order of the prompt.",
    ),
]
InstanceText = Annotated[
    str,
    msgspec.Meta(
        pattern=f"^{INSTANCE_PATTERN}${NO_LINE_END}",
        max_length=128,
        description="An instance's id, the same at lookup and broker.",
    ),
]
TenantText = Annotated[str, msgspec.Meta(pattern=f"^{TENANT_PATTERN}${NO_LINE_END}", max_length=63)]
ChunksTenant = Annotated[
    TenantText | None,
    msgspec.Meta(description="Tenant that owns the chunks; null: the caller's."),
]
TierText = Annotated[
    str,
    msgspec.Meta(
        pattern=f"^{TIER_PATTERN}${NO_LINE_END}",
        max_length=32,
        description="The instance's tier that has the chunk, for example `memory`.",
    ),
]
KnownTierText = Annotated[
    str,
    msgspec.Meta(
        pattern=f"^{TIER_PATTERN}${NO_LINE_END}",
        max_length=32,
        description=(
            "The instance's tier: one of `memory`, `disk`, `peers`, `storage` and `bucket`, or"
            " LMCache's name of one."
        ),
        # Checked by the service, which says so in a sentence.
        extra_json_schema={"enum": sorted(KNOWN_TIERS)},
    ),
]
PackedIds = Annotated[
    bytes,
    msgspec.Meta(
        max_length=MAX_CHUNKS_PER_LOOKUP * CHUNK_ID_BYTES,
        description=(
            "Chunk ids of 16 bytes, joined: MessagePack's bin; for a prefix in the order of the"
            " prompt."
        ),
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
Excluded = Annotated[
    list[InstanceText],
    msgspec.Meta(
        max_length=MAX_EXCLUDED,
        description="Instances whose holdings do not count, for example the caller.",
    ),
]
SizeBytes = Annotated[
    int,
    msgspec.Meta(
        ge=0, le=MAX_SIZE_BYTES, description="Size of the record in bytes; 0 for a removal."
    ),
]
Incarnation = Annotated[
    int,
    msgspec.Meta(
        ge=0,
        le=MAX_INCARNATION,
        description="Life of the instance: higher with every start and after every resync.",
    ),
]
SequenceNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
NextSequence = Annotated[
    SequenceNumber,
    msgspec.Meta(description="Number of the event that the service expects next."),
]
Resync = Annotated[
    bool,
    msgspec.Meta(
        description="The service requires a higher incarnation and all events from the beginning."
    ),
]
Degraded = Annotated[
    bool,
    msgspec.Meta(
        description=(
            "The index was unavailable: nothing is known, which does not mean that nothing is held."
        )
    ),
]
Count = Annotated[int, msgspec.Meta(ge=0)]
TtlMs = Annotated[int, msgspec.Meta(gt=0, le=MAX_TTL_MS)]


class Holding(NamedTuple):
    """One chunk that an instance holds in one tier.

    Attributes:
        chunk_id: 16 bytes.
        tier: Name of the tier, one of `lmcache_core.names.KNOWN_TIERS`.
        size_bytes: Size of the record.
        tenant: Tenant that owns it; None is the tenant of the instance's own token. Another one
            needs a token with the role `admin`.
    """

    chunk_id: bytes
    tier: str
    size_bytes: int
    tenant: str | None = None


class StoreEvent(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that was added to a tier of the instance, or removed: an array."""

    op: EventOp
    chunk_id: PackedId
    tier: KnownTierText
    size_bytes: SizeBytes = 0
    tenant: ChunksTenant = None


class Holder(msgspec.Struct, frozen=True):
    """A holder of a chunk."""

    instance: InstanceText
    kind: InstanceKind
    tier: TierText
    size_bytes: SizeBytes


class _TextIds(msgspec.Struct, frozen=True):
    """Chunk ids as JSON."""

    chunk_ids: ChunkIdTexts

    @property
    def ids(self) -> list[bytes]:
        """Chunk ids, 16 bytes each."""
        return read_ids(self.chunk_ids)


class ChunksRequest(_TextIds, frozen=True, omit_defaults=True):
    """Chunks, in order, and instances whose holdings do not count."""

    exclude: Excluded = msgspec.field(default_factory=list)


class PackedChunksRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`ChunksRequest` as MessagePack."""

    chunk_ids: PackedIds
    exclude: Excluded = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.chunk_ids) % CHUNK_ID_BYTES:
            raise ValueError(
                f"{len(self.chunk_ids)} bytes are not a list of chunk ids: each has"
                f" {CHUNK_ID_BYTES}"
            )

    @property
    def ids(self) -> list[bytes]:
        """Chunk ids, 16 bytes each."""
        return split_ids(self.chunk_ids)


class LeaseRequest(msgspec.Struct, frozen=True):
    """An instance's description of itself.

    Attributes:
        ttl_ms: Length of the lease in milliseconds, which the service may shorten or extend to its
            own bounds; null: its default.
    """

    incarnation: Incarnation
    kind: InstanceKind
    ttl_ms: TtlMs | None = None


class EventsRequest(msgspec.Struct, frozen=True):
    """Events of one instance, with consecutive numbers from `first_sequence` on.

    Attributes:
        first_sequence: Number of the first event; those of an incarnation are numbered from 0.
        events: In the order in which they happened.
    """

    instance: InstanceText
    incarnation: Incarnation
    first_sequence: SequenceNumber
    events: Annotated[list[StoreEvent], msgspec.Meta(max_length=MAX_EVENTS_PER_BATCH)]


class EvictRequest(_TextIds, frozen=True):
    """Chunks to forget."""

    tenant: ChunksTenant = None


_HoldersOfChunk = Annotated[
    list[Holder], msgspec.Meta(min_length=1, max_length=MAX_HOLDERS_PER_CHUNK)
]


class LookupAnswer(msgspec.Struct, frozen=True):
    """Answer to a lookup.

    Attributes:
        num_prefix: How many of the chunks, from the first, have a holder.
        holders: Holders of each of them: `num_prefix` lists with at least one entry.
    """

    num_prefix: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS_PER_LOOKUP)]
    holders: Annotated[list[_HoldersOfChunk], msgspec.Meta(max_length=MAX_CHUNKS_PER_LOOKUP)]
    degraded: Degraded = False


class PackedHolder(msgspec.Struct, frozen=True, array_like=True):
    """`Holder` as MessagePack: an array."""

    instance: InstanceText
    kind: InstanceKind
    tier: TierText
    size_bytes: SizeBytes


class HolderRun(msgspec.Struct, frozen=True, array_like=True):
    """A run of consecutive chunks with the same holders: an array.

    Attributes:
        num_chunks: How many chunks follow one another with these holders.
        holders: The holders of each of them.
    """

    num_chunks: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNKS_PER_LOOKUP)]
    holders: Annotated[
        list[PackedHolder], msgspec.Meta(min_length=1, max_length=MAX_HOLDERS_PER_CHUNK)
    ]

    def unpack(self) -> list[Holder]:
        """Return the holders."""
        return [Holder(one.instance, one.kind, one.tier, one.size_bytes) for one in self.holders]


class PackedLookupAnswer(msgspec.Struct, frozen=True):
    """`LookupAnswer` as MessagePack.

    Attributes:
        num_prefix: How many of the chunks, from the first, have a holder.
        runs: The holders of the prefix, in its order: their chunks add up to `num_prefix`.
    """

    num_prefix: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS_PER_LOOKUP)]
    runs: Annotated[list[HolderRun], msgspec.Meta(max_length=MAX_CHUNKS_PER_LOOKUP)]
    degraded: Degraded = False

    def unpack(self) -> LookupAnswer:
        """Return the answer; chunks of a run share one list of holders.

        Raises:
            ValueError: The lengths of the runs do not add up to `num_prefix`.
        """
        if sum(run.num_chunks for run in self.runs) != self.num_prefix:
            raise ValueError(f"its runs do not add up to {self.num_prefix} chunks")
        holders: list[list[Holder]] = []
        for run in self.runs:
            holders += [run.unpack()] * run.num_chunks
        return LookupAnswer(self.num_prefix, holders, self.degraded)


class RouteEntry(msgspec.Struct, frozen=True):
    """How long a prefix one instance holds by itself.

    Attributes:
        num_prefix: How many of the chunks, from the first, it holds in any of its tiers.
    """

    instance: InstanceText
    num_prefix: Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNKS_PER_LOOKUP)]


class RouteAnswer(msgspec.Struct, frozen=True):
    """Answer to a route request.

    Attributes:
        instances: Those that hold the first chunk, longest prefix first.
    """

    instances: Annotated[list[RouteEntry], msgspec.Meta(max_length=MAX_INSTANCES_PER_ANSWER)]
    degraded: Degraded = False


class ContainsAnswer(msgspec.Struct, frozen=True):
    """Answer to a batch contains.

    Attributes:
        present: For each chunk of the request, in its order, whether it has a holder.
    """

    present: Annotated[list[bool], msgspec.Meta(max_length=MAX_CHUNKS_PER_LOOKUP)]
    degraded: Degraded = False


class LocationsAnswer(msgspec.Struct, frozen=True):
    """The holders of one chunk.

    Attributes:
        holders: One for each instance and tier, at most 64; empty if none is known.
    """

    holders: Annotated[list[Holder], msgspec.Meta(max_length=MAX_LOCATIONS)]
    degraded: Degraded = False


class InstanceLease(msgspec.Struct, frozen=True):
    """Answer to a lease's renewal.

    Attributes:
        ttl_ms: The lease ends this many milliseconds after the request, unless renewed.
    """

    ttl_ms: TtlMs
    next_sequence: NextSequence
    resync: Resync


class EventsAck(msgspec.Struct, frozen=True):
    """Answer to a batch of events."""

    next_sequence: NextSequence
    resync: Resync


class InstanceEntry(msgspec.Struct, frozen=True):
    """A live lease.

    Attributes:
        expires_in_ms: Milliseconds until it ends, unless renewed.
    """

    instance: InstanceText
    kind: InstanceKind
    incarnation: Incarnation
    next_sequence: NextSequence
    expires_in_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_TTL_MS)]


class InstancesAnswer(msgspec.Struct, frozen=True):
    """The live leases that tokens of the caller's tenant took.

    Attributes:
        instances: One for each instance, by its id.
    """

    instances: Annotated[list[InstanceEntry], msgspec.Meta(max_length=MAX_LEASES)]


class StatsAnswer(msgspec.Struct, frozen=True):
    """Figures of one tenant.

    Attributes:
        index: Where the index is: `embedded` (in the process) or `redis`.
        num_chunks: Chunks that the index knows, some perhaps of leases that ended; null if it was
            unavailable.
        num_instances: Instances with a live lease of this tenant; null if the index was
            unavailable.
    """

    index: str
    degraded: Degraded
    num_chunks: Count | None
    num_instances: Count | None


class TenantsAnswer(msgspec.Struct, frozen=True):
    """A page of tenants for which chunks were stored.

    Attributes:
        tenants: Their names, sorted; some may have no chunks left.
        next_after: The `after` of the next page; null at the end.
    """

    tenants: Annotated[list[TenantText], msgspec.Meta(max_length=MAX_TENANTS_PER_ANSWER)]
    next_after: TenantText | None


class EvictedAnswer(msgspec.Struct, frozen=True):
    """The result of an eviction.

    Attributes:
        num_evicted: How many of the chunks had a holder in the index.
    """

    num_evicted: Count


def chunk_id_text(chunk_id: bytes) -> str:
    """Return the 32 hex digits of a chunk id.

    Raises:
        ValueError: Its length is not 16 bytes.
    """
    if len(chunk_id) != CHUNK_ID_BYTES:
        raise ValueError(f"a chunk id has {CHUNK_ID_BYTES} bytes, not {len(chunk_id)}")
    return chunk_id.hex()


def validate_tier(tier: str) -> str:
    """Return `tier` unchanged.

    Raises:
        ValueError: It is not a valid name of a tier.
    """
    if _TIER.fullmatch(tier) is None:
        raise ValueError(f"a tier's name matches {TIER_PATTERN}")
    return tier


def read_ids(texts: Sequence[str]) -> list[bytes]:
    """Read chunk ids from their hex digits."""
    return split_ids(bytes.fromhex("".join(texts)))


def split_ids(packed: bytes) -> list[bytes]:
    """Split joined chunk ids."""
    return [chunk_id for (chunk_id,) in _ID.iter_unpack(packed)]


def pack_ids(chunk_ids: Sequence[bytes]) -> bytes:
    """Join chunk ids.

    Raises:
        ValueError: The length of one is not 16 bytes.
    """
    for chunk_id in chunk_ids:
        if len(chunk_id) != CHUNK_ID_BYTES:
            chunk_id_text(chunk_id)  # its error states the length
    return b"".join(chunk_ids)


def pack_run(num_chunks: int, holders: Sequence[Holder]) -> HolderRun:
    """Return a run of chunks with these holders, of which the first 16 are named."""
    named = [
        PackedHolder(one.instance, one.kind, one.tier, one.size_bytes)
        for one in holders[:MAX_HOLDERS_PER_CHUNK]
    ]
    return HolderRun(num_chunks, named)
