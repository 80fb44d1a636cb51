"""What instances, engines and the lookup service tell each other (see `docs/protocols.md`, lookup)."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from lmcache_core.keys import CHUNK_ID_BYTES
from lmcache_core.security.names import INSTANCE_PATTERN

InstanceKind = Literal["sidecar", "storage"]
EventOp = Literal["store", "remove"]

MAX_CHUNKS_PER_LOOKUP: Final = 8192
MAX_HOLDERS_PER_CHUNK: Final = 16
MAX_INSTANCES_PER_ANSWER: Final = 4096
MAX_EVENTS_PER_BATCH: Final = 2048
MAX_INCARNATION: Final = (1 << 63) - 1
MAX_SIZE_BYTES: Final = 1 << 40
TIER_PATTERN: Final = r"[A-Za-z][A-Za-z0-9_-]{0,31}"

_TIER = re.compile(TIER_PATTERN)

_InstanceText = Annotated[str, msgspec.Meta(pattern=f"^{INSTANCE_PATTERN}$", max_length=128)]
_TierText = Annotated[str, msgspec.Meta(pattern=f"^{TIER_PATTERN}$", max_length=32)]
_SizeBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE_BYTES)]
_Sequence = Annotated[int, msgspec.Meta(ge=0, le=MAX_INCARNATION)]
_TtlMs = Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]


class Holding(NamedTuple):
    """One chunk that an instance holds in one tier.

    Attributes:
        chunk_id: 16 bytes.
        tier: Name of the tier; any short word.
        size_bytes: Size of the record.
        tenant: In whose namespace; None is the tenant of the instance's own token. Another one needs a token with the role `admin`.
    """

    chunk_id: bytes
    tier: str
    size_bytes: int
    tenant: str | None = None


class StoreEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A store or a removal, as `POST /v1/events` carries it."""

    op: EventOp
    chunk_id: str
    tier: str
    size_bytes: int = 0
    tenant: str | None = None


class Holder(msgspec.Struct, frozen=True):
    """Who holds a chunk.

    Attributes:
        instance: The instance's id, which the broker knows too.
        kind: What it is.
        tier: Where it lies there.
        size_bytes: Size of the record.
    """

    instance: _InstanceText
    kind: InstanceKind
    tier: _TierText
    size_bytes: _SizeBytes


_HoldersOfChunk = Annotated[list[Holder], msgspec.Meta(min_length=1, max_length=MAX_HOLDERS_PER_CHUNK)]


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

    instance: _InstanceText
    num_prefix: Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNKS_PER_LOOKUP)]


class RouteAnswer(msgspec.Struct, frozen=True):
    """Answer to a route request: instances that hold the first chunk, longest prefix first; `degraded` as in `LookupAnswer`."""

    instances: Annotated[list[RouteEntry], msgspec.Meta(max_length=MAX_INSTANCES_PER_ANSWER)]
    degraded: bool = False


class InstanceLease(msgspec.Struct, frozen=True):
    """Answer to a lease's renewal.

    Attributes:
        ttl_ms: The lease ends this long after the request, unless renewed.
        next_sequence: The event that the service waits for.
        resync: The service wants a higher incarnation and everything from the beginning.
    """

    ttl_ms: _TtlMs
    next_sequence: _Sequence
    resync: bool


class EventsAck(msgspec.Struct, frozen=True):
    """Answer to a batch of events; the fields are those of `InstanceLease`."""

    next_sequence: _Sequence
    resync: bool


class LookupRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/lookup`."""

    chunk_ids: list[str]
    exclude: list[str]


class RouteRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/route`."""

    chunk_ids: list[str]


class LeaseRequest(msgspec.Struct, frozen=True):
    """Body of `PUT /v1/instances/{id}`."""

    incarnation: int
    kind: InstanceKind
    ttl_ms: int


class EventsRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/events`."""

    instance: str
    incarnation: int
    first_sequence: int
    events: list[StoreEvent]


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
