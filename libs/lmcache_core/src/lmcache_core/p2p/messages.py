"""The JSON between instances and broker (see `docs/protocols.md`, p2p_broker)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from lmcache_core.names import validate_instance_id
from lmcache_core.p2p.distributed_url import parse_distributed_url

PeerKind = Literal["sidecar", "storage"]

MAX_CHUNKS_PER_TRANSFER: Final = 4096
MAX_HOLDERS_PER_CHUNK: Final = 16
MAX_COPIES_PER_LEASE: Final = 64
MAX_PEERS_PER_LISTING: Final = 65536
CHUNK_ID_BYTES: Final = 16
MAX_TIERS: Final = 16
MAX_COUNTED_LABELS: Final = 32
"""Names in one table: tiers, reasons of misses."""
MAX_COUNTED_PEERS: Final = 64
MAX_LABEL_CHARS: Final = 253
MAX_COUNT: Final = (1 << 53) - 1
"""Larger numbers are not the same in every JSON."""

_ShortText = Annotated[str, msgspec.Meta(max_length=300)]
_PullText = Annotated[str, msgspec.Meta(max_length=64)]
_TicketText = Annotated[str, msgspec.Meta(max_length=4096)]
_ChunkIdText = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$(?!\n)")]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_PositiveMs = Annotated[int, msgspec.Meta(gt=0, lt=1 << 53)]


class Peer(msgspec.Struct, frozen=True):
    """An instance that serves chunks, as it describes itself; the broker reads its tenant from its
    token.

    Attributes:
        id: The instance's id, unique in its tenant.
        incarnation: Rises with every start; a lower one than the known one is refused.
        distributed_url: Where it serves, `lm://host:port`.
        kind: What it is.
        zone: Failure domain (`topology.kubernetes.io/zone`), or empty.
        node: Machine, or empty.

    Raises:
        ValueError: The id or the URL is malformed, or the incarnation negative.
    """

    id: str
    incarnation: int
    distributed_url: str
    kind: PeerKind = "sidecar"
    zone: str = ""
    node: str = ""

    def __post_init__(self) -> None:
        validate_instance_id(self.id)
        parse_distributed_url(self.distributed_url)
        if self.incarnation < 0:
            raise ValueError("an incarnation is not negative")


class DrainReport(msgspec.Struct, frozen=True):
    """How far an instance is that is about to end.

    Attributes:
        state: `serving`, `writing`, `handing_over` or `done`; a newer instance may name others.
        total: Chunks that it holds; the sum of the others.
        handed_over: Sent to peers or storage, and kept there.
        already_elsewhere: Held by another peer already.
        failed: No peer took them, or they could not be read.
        left: Not dealt with so far.
    """

    state: _ShortText
    total: _Count
    handed_over: _Count
    already_elsewhere: _Count
    failed: _Count
    left: _Count


class CopyOrder(msgspec.Struct, frozen=True):
    """The broker's request that an instance copies a chunk (32 hex digits) to a peer."""

    chunk_id: _ChunkIdText
    instance: _ShortText
    distributed_url: _ShortText


class PeerStatus(Peer, frozen=True, kw_only=True):
    """A live peer as the broker sees it.

    Attributes:
        load: What it last reported, 0 (idle) to 1 (full).
        draining: Gets no new pulls.
        num_pulls: Tickets to it that have not expired.
        expires_in_ms: What is left of its lease.
        drain: How far it is on its way to its end, if it has said so.
    """

    load: float
    draining: bool
    num_pulls: int
    expires_in_ms: int
    drain: DrainReport | None = None


class Lease(msgspec.Struct, frozen=True):
    """The broker's answer to an announcement.

    Attributes:
        ttl_ms: The lease ends this long after the announcement, unless renewed.
        draining: The instance gets no new pulls.
        copies: Chunks of the instance that many ask for, and who should have them too.
    """

    ttl_ms: _PositiveMs
    draining: bool
    copies: Annotated[tuple[CopyOrder, ...], msgspec.Meta(max_length=MAX_COPIES_PER_LEASE)] = ()


class Assignment(msgspec.Struct, frozen=True):
    """One pull that the broker has granted.

    Attributes:
        instance: Who serves.
        distributed_url: Where.
        chunk_ids: What, 32 hex digits each, in the order of the request.
        ticket: What to show to the serving instance. A secret until it expires.
        expires_ms: End of the ticket, Unix time in milliseconds.
        pull: Names the pull when it is renewed or over; empty when the broker is too old for that.
        ttl_ms: Life of the ticket from now; 0 when the broker is too old to renew it.
    """

    instance: _ShortText
    distributed_url: _ShortText
    chunk_ids: Annotated[
        list[_ChunkIdText], msgspec.Meta(min_length=1, max_length=MAX_CHUNKS_PER_TRANSFER)
    ]
    ticket: _TicketText
    expires_ms: _PositiveMs
    pull: _PullText = ""
    ttl_ms: _Count = 0

    def __repr__(self) -> str:
        return (
            f"Assignment(instance={self.instance!r}, distributed_url={self.distributed_url!r},"
            f" num_chunks={len(self.chunk_ids)})"
        )


class TierFigures(msgspec.Struct, frozen=True):
    """How full one tier is.

    Attributes:
        name: The tier's.
        num_chunks: Chunks that it holds.
        used_bytes: What they take.
        capacity_bytes: What it may take; 0 where that is not known here.
    """

    name: Annotated[str, msgspec.Meta(max_length=MAX_LABEL_CHARS)]
    num_chunks: _Count
    used_bytes: _Count
    capacity_bytes: _Count


class PeerFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts since the instance's start, and what it holds now, for people who look at the
    cluster: only which pod may be ended at the least loss is decided by it. All may be left out.

    Attributes:
        requested_chunks: Chunks that engines wanted.
        loaded_chunks: Chunks that they got, by the tier that had them.
        loaded_bytes: Bytes of these.
        missed_chunks: Chunks that they did not get, by reason.
        stored_chunks: Chunks that engines stored.
        stored_bytes: Bytes of these.
        pulled_bytes: Bytes that came from peers, by the peer's id.
        tiers: How full its own tiers are.
        sole_bytes: Bytes of chunks that no other peer holds, as far as it knows; None where it does
            not.
    """

    requested_chunks: _Count = 0
    loaded_chunks: dict[str, _Count] = {}
    loaded_bytes: dict[str, _Count] = {}
    missed_chunks: dict[str, _Count] = {}
    stored_chunks: _Count = 0
    stored_bytes: _Count = 0
    pulled_bytes: dict[str, _Count] = {}
    tiers: tuple[TierFigures, ...] = ()
    sole_bytes: _Count | None = None


class AnnounceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of `PUT /v1/peers/{id}`."""

    incarnation: int
    distributed_url: str
    kind: PeerKind
    zone: str
    node: str
    load: float
    ttl_ms: int | None
    draining: bool
    drain: DrainReport | None = None
    figures: PeerFigures | None = None


class HeldBy(NamedTuple):
    """Who may hold a chunk, and in which of its tiers."""

    instance: str
    tier: str


class ChunkHolders(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chunk (32 hex digits), the ids of those who may hold it, and in which tier each has it:
    as many, or none.
    """

    chunk_id: str
    holders: list[str]
    tiers: list[str] = []


class TransferRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of `POST /v1/transfers`."""

    requester: str
    chunks: list[ChunkHolders]
    wait_ms: int = 0


class PullsRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/transfers:renew` and of `POST /v1/transfers:done`."""

    requester: str
    pulls: list[str]


class Renewal(msgspec.Struct, frozen=True):
    """A pull that is prolonged.

    Attributes:
        pull: Its `Assignment.pull`.
        ticket: Replaces the one before. A secret until it expires.
        expires_ms: End of the ticket, Unix time in milliseconds.
        ttl_ms: Life of the ticket from now.
    """

    pull: _PullText
    ticket: _TicketText
    expires_ms: _PositiveMs
    ttl_ms: _PositiveMs

    def __repr__(self) -> str:
        return f"Renewal(pull={self.pull!r}, ttl_ms={self.ttl_ms})"


class RenewResponse(msgspec.Struct, frozen=True):
    """Answer to `POST /v1/transfers:renew`. A broker that is too old says something else, in
    which nothing is renewed.
    """

    renewed: Annotated[tuple[Renewal, ...], msgspec.Meta(max_length=MAX_CHUNKS_PER_TRANSFER)] = ()


class TransferResponse(msgspec.Struct, frozen=True):
    """Answer to `POST /v1/transfers`; what is unassigned is what no assignment names."""

    assignments: Annotated[list[Assignment], msgspec.Meta(max_length=MAX_CHUNKS_PER_TRANSFER)]


class PeersResponse(msgspec.Struct, frozen=True):
    """Answer to `GET /v1/peers`."""

    peers: Annotated[list[PeerStatus], msgspec.Meta(max_length=MAX_PEERS_PER_LISTING)]


def bounded(counts: Mapping[str, int], max_names: int = MAX_COUNTED_LABELS) -> dict[str, int]:
    """Return the largest of these counts, at most so many, with names that a heartbeat may hold."""
    named = (
        (name, min(count, MAX_COUNT))
        for name, count in counts.items()
        if 0 < len(name) <= MAX_LABEL_CHARS
    )
    return dict(sorted(named, key=lambda entry: (-entry[1], entry[0]))[:max_names])


def tier_figures(stats: Mapping[str, Mapping[str, int]]) -> tuple[TierFigures, ...]:
    """Return how full tiers are, for a heartbeat.

    Args:
        stats: `StorageBackend.stats` of each, by its name.
    """
    return tuple(
        TierFigures(
            name,
            figures.get("num_chunks", 0),
            figures.get("used_bytes", 0),
            figures.get("capacity_bytes", 0),
        )
        for name, figures in list(stats.items())[:MAX_TIERS]
    )
