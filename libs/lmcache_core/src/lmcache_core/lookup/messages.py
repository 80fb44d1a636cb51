"""What instances, engines and the lookup service tell each other (see `docs/protocols.md`,
lookup).
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from lmcache_core.keys import CHUNK_ID_BYTES
from lmcache_core.security.names import INSTANCE_PATTERN, TENANT_PATTERN

InstanceKind = Literal["sidecar", "storage"]
EventOp = Literal["store", "remove"]

MAX_CHUNKS_PER_LOOKUP: Final = 8192
MAX_HOLDERS_PER_CHUNK: Final = 16
MAX_INSTANCES_PER_ANSWER: Final = 4096
MAX_EVENTS_PER_BATCH: Final = 2048
MAX_EXCLUDED: Final = 1024
MAX_LOCATIONS: Final = 64
MAX_INCARNATION: Final = (1 << 63) - 1
MAX_SEQUENCE: Final = (1 << 53) - 1
MAX_SIZE_BYTES: Final = 1 << 40
MAX_TTL_MS: Final = 1 << 40
TIER_PATTERN: Final = r"[A-Za-z][A-Za-z0-9_-]{0,31}"
NO_LINE_END: Final = r"(?!\n)"
"""Ends our patterns: Python's `$` also matches before a line's end. JSON Schema's does not, so
that a document leaves it out.
"""

_TIER = re.compile(TIER_PATTERN)

ChunkIdText = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[0-9a-f]{32}$",
        min_length=32,
        max_length=32,
        description="A chunk id: 32 hex digits.",
    ),
]
ChunkIdTexts = Annotated[list[ChunkIdText], msgspec.Meta(max_length=MAX_CHUNKS_PER_LOOKUP)]
InstanceText = Annotated[
    str, msgspec.Meta(pattern=f"^{INSTANCE_PATTERN}${NO_LINE_END}", max_length=128)
]
TenantText = Annotated[str, msgspec.Meta(pattern=f"^{TENANT_PATTERN}${NO_LINE_END}", max_length=63)]
TierText = Annotated[str, msgspec.Meta(pattern=f"^{TIER_PATTERN}${NO_LINE_END}", max_length=32)]
SizeBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE_BYTES)]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=MAX_INCARNATION)]
Sequence = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
TtlMs = Annotated[int, msgspec.Meta(gt=0, le=MAX_TTL_MS)]


class Holding(NamedTuple):
    """One chunk that an instance holds in one tier.

    Attributes:
        chunk_id: 16 bytes.
        tier: Name of the tier; any short word.
        size_bytes: Size of the record.
        tenant: In whose namespace; None is the tenant of the instance's own token. Another one
            needs a token with the role `admin`.
    """

    chunk_id: bytes
    tier: str
    size_bytes: int
    tenant: str | None = None


class StoreEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chunk came to a tier of the instance, or went. Without `tenant` it is one of the
    caller's tenant.
    """

    op: EventOp
    chunk_id: ChunkIdText
    tier: TierText
    size_bytes: SizeBytes = 0
    tenant: TenantText | None = None


class Holder(msgspec.Struct, frozen=True):
    """Who holds a chunk.

    Attributes:
        instance: The instance's id, which the broker knows too.
        kind: What it is.
        tier: Where it lies there.
        size_bytes: Size of the record.
    """

    instance: InstanceText
    kind: InstanceKind
    tier: TierText
    size_bytes: SizeBytes


_HoldersOfChunk = Annotated[
    list[Holder], msgspec.Meta(min_length=1, max_length=MAX_HOLDERS_PER_CHUNK)
]


class LookupAnswer(msgspec.Struct, frozen=True):
    """Answer to a lookup.

    Attributes:
        num_prefix: How many of the chunks, from the first on, somebody holds.
        holders: Who holds each of them, `num_prefix` lists with at least one entry.
        degraded: The index was away: nothing is known, which is not the same as nothing being held.
    """

    num_prefix: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS_PER_LOOKUP)]
    holders: Annotated[list[_HoldersOfChunk], msgspec.Meta(max_length=MAX_CHUNKS_PER_LOOKUP)]
    degraded: bool = False


class RouteEntry(msgspec.Struct, frozen=True):
    """How long a prefix one instance holds by itself."""

    instance: InstanceText
    num_prefix: Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNKS_PER_LOOKUP)]


class RouteAnswer(msgspec.Struct, frozen=True):
    """Answer to a route request: instances that hold the first chunk, longest prefix first;
    `degraded` as in `LookupAnswer`.
    """

    instances: Annotated[list[RouteEntry], msgspec.Meta(max_length=MAX_INSTANCES_PER_ANSWER)]
    degraded: bool = False


class ContainsAnswer(msgspec.Struct, frozen=True):
    """Answer to a batch contains: for each chunk that was asked about whether somebody holds it;
    `degraded` as in `LookupAnswer`.
    """

    present: Annotated[list[bool], msgspec.Meta(max_length=MAX_CHUNKS_PER_LOOKUP)]
    degraded: bool = False


class LocationsAnswer(msgspec.Struct, frozen=True):
    """Everybody who holds one chunk; `degraded` as in `LookupAnswer`."""

    holders: Annotated[list[Holder], msgspec.Meta(max_length=MAX_LOCATIONS)]
    degraded: bool = False


class InstanceLease(msgspec.Struct, frozen=True):
    """Answer to a lease's renewal.

    Attributes:
        ttl_ms: The lease ends this long after the request, unless renewed.
        next_sequence: The event that the service waits for.
        resync: The service wants a higher incarnation and everything from the beginning.
    """

    ttl_ms: TtlMs
    next_sequence: Sequence
    resync: bool


class EventsAck(msgspec.Struct, frozen=True):
    """Answer to a batch of events; the fields are those of `InstanceLease`."""

    next_sequence: Sequence
    resync: bool


def chunk_id_text(chunk_id: bytes) -> str:
    """The 32 hex digits of a chunk id.

    Raises:
        ValueError: It has not 16 bytes.
    """
    if len(chunk_id) != CHUNK_ID_BYTES:
        raise ValueError(f"a chunk id has {CHUNK_ID_BYTES} bytes, not {len(chunk_id)}")
    return chunk_id.hex()


def validate_tier(tier: str) -> str:
    """Return `tier` unchanged.

    Raises:
        ValueError: It is not a tier's name.
    """
    if _TIER.fullmatch(tier) is None:
        raise ValueError(f"a tier's name matches {TIER_PATTERN}")
    return tier
