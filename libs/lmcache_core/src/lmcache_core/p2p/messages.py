"""Messages between instances and the broker (`docs/protocols.md`, p2p_broker).

Client and broker read and write these types, and the broker's OpenAPI document is generated from
them; what a field means is in the docstring of its class. Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from lmcache_core.lookup.messages import (
    MAX_HOLDERS_PER_CHUNK,
    NO_LINE_END,
    ChunkIdText,
    Incarnation,
    InstanceText,
    TierText,
)
from lmcache_core.names import validate_instance_id
from lmcache_core.p2p.distributed_url import parse_distributed_url

PeerKind = Literal["sidecar", "storage"]

MAX_CHUNKS_PER_TRANSFER: Final = 4096
MAX_COPIES_PER_LEASE: Final = 64
MAX_PEERS_PER_LISTING: Final = 65536
MAX_WAIT_MS: Final = 10_000
CHUNK_ID_BYTES: Final = 16
MAX_TIERS: Final = 16
MAX_COUNTED_LABELS: Final = 32
"""Largest number of names in one table: tiers, reasons of misses."""
MAX_COUNTED_PEERS: Final = 64
MAX_LABEL_CHARS: Final = 253
MAX_COUNT: Final = (1 << 53) - 1
"""Larger numbers are not represented exactly in every JSON implementation."""

ShortText = Annotated[str, msgspec.Meta(max_length=300)]
TopologyName = Annotated[str, msgspec.Meta(pattern=rf"^[A-Za-z0-9._-]{{0,253}}${NO_LINE_END}")]
TicketText = Annotated[str, msgspec.Meta(max_length=4096)]
PullId = Annotated[str, msgspec.Meta(pattern=rf"^[A-Za-z0-9_-]{{1,64}}${NO_LINE_END}")]
PositiveMs = Annotated[int, msgspec.Meta(gt=0, lt=1 << 53)]
BoundedCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
Counts = Annotated[dict[Label, BoundedCount], msgspec.Meta(max_length=MAX_COUNTED_LABELS)]


class Peer(msgspec.Struct, frozen=True):
    """An instance that serves chunks, as it describes itself. The broker takes its owner from its
    token.

    Attributes:
        id: The instance's id, unique in its tenant.
        incarnation: Increases with every start; a value below the last known one is refused.
        distributed_url: Its address, `lm://host:port` or `lm+tls://host:port`.
        kind: The sidecar of a pod, or a storage server.
        zone: Failure domain (`topology.kubernetes.io/zone`); empty: unknown.
        node: Machine; empty: unknown.

    Raises:
        ValueError: The id or the URL is malformed, or the incarnation is negative.
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
            raise ValueError("an incarnation must not be negative")


class DrainReport(msgspec.Struct, frozen=True):
    """Progress of a drain.

    Attributes:
        state: `serving`, `writing`, `handing_over` or `done`; a newer instance may have others.
        total: Chunks that the instance holds; the sum of the others.
        handed_over: Sent to peers or storage, and stored there.
        already_elsewhere: Already held by another peer.
        failed: Accepted by no peer, or unreadable.
        left: Not processed yet.
    """

    state: Annotated[str, msgspec.Meta(pattern=rf"^[a-z_]{{1,32}}${NO_LINE_END}")]
    total: BoundedCount
    handed_over: BoundedCount
    already_elsewhere: BoundedCount
    failed: BoundedCount
    left: BoundedCount


class CopyOrder(msgspec.Struct, frozen=True):
    """Order to copy a chunk to another peer.

    Attributes:
        instance: Id of the peer that should get the copy.
        distributed_url: Address of that peer.
    """

    chunk_id: ChunkIdText
    instance: ShortText
    distributed_url: ShortText


class PeerStatus(Peer, frozen=True, kw_only=True):
    """A live peer as the broker sees it.

    Attributes:
        load: The load it last reported, 0 (idle) to 1 (full).
        draining: Gets no new pulls.
        num_pulls: Tickets to it that have not expired.
        expires_in_ms: Milliseconds until its lease ends, unless renewed.
        drain: Progress of its drain; null if it reports none.
    """

    load: float
    draining: bool
    num_pulls: int
    expires_in_ms: int
    drain: DrainReport | None = None


class Lease(msgspec.Struct, frozen=True):
    """The lease that the broker granted.

    Attributes:
        ttl_ms: The lease ends this many milliseconds after the announcement, unless renewed.
        draining: The instance gets no new pulls, and should drain.
        copies: Hot chunks that the instance should copy to other peers.
    """

    ttl_ms: PositiveMs
    draining: bool
    copies: Annotated[tuple[CopyOrder, ...], msgspec.Meta(max_length=MAX_COPIES_PER_LEASE)] = ()


class TierFigures(msgspec.Struct, frozen=True):
    """Fill level of one tier.

    Attributes:
        name: Name of the tier: `memory` or `disk`.
        num_chunks: Chunks that it holds.
        used_bytes: Bytes that they take.
        capacity_bytes: Bytes that it may use; 0 if unknown.
    """

    name: Label
    num_chunks: BoundedCount
    used_bytes: BoundedCount
    capacity_bytes: BoundedCount


class ModelFigures(msgspec.Struct, frozen=True):
    """What an instance saved the engines of one model since its start.

    Attributes:
        saved_tokens: Tokens of prompts whose KV was loaded instead of computed.
        saved_ms: Milliseconds of prefill for these, by the engines' own speed; 0 if they do not
            know it.
        chunk_tokens: Tokens for each chunk: of all ranks and groups of layers, so that a prompt's
            tokens are its chunks times this.
    """

    saved_tokens: BoundedCount = 0
    saved_ms: BoundedCount = 0
    chunk_tokens: Annotated[float, msgspec.Meta(ge=0, le=1 << 32)] = 0


class PeerFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters of an instance since its start, and what it holds now. Every field is optional.

    Attributes:
        requested_chunks: Chunks that engines asked for.
        loaded_chunks: Chunks that engines got, by tier.
        loaded_bytes: Their bytes, by tier.
        missed_chunks: Chunks that engines did not get, by reason.
        stored_chunks: Chunks that engines stored.
        stored_bytes: Their bytes.
        pulled_bytes: Bytes pulled from peers, by the peer's id.
        tiers: Fill levels of its own tiers.
        sole_bytes: Bytes of chunks without another holder, as far as the instance knows; null if it
            does not know.
        models: Its savings, by model.
    """

    requested_chunks: BoundedCount = 0
    loaded_chunks: Counts = {}
    loaded_bytes: Counts = {}
    missed_chunks: Counts = {}
    stored_chunks: BoundedCount = 0
    stored_bytes: BoundedCount = 0
    pulled_bytes: Annotated[
        dict[Label, BoundedCount], msgspec.Meta(max_length=MAX_COUNTED_PEERS)
    ] = {}
    tiers: Annotated[tuple[TierFigures, ...], msgspec.Meta(max_length=MAX_TIERS)] = ()
    sole_bytes: BoundedCount | None = None
    models: Annotated[dict[Label, ModelFigures], msgspec.Meta(max_length=MAX_COUNTED_LABELS)] = {}


class AnnounceRequest(msgspec.Struct, frozen=True):
    """Announcement of a peer; body of `PUT /v1/peers/{id}`.

    Attributes:
        incarnation: Increases with every start of the peer.
        distributed_url: Its address, `lm://host:port` or `lm+tls://host:port`.
        kind: The sidecar of a pod, or a storage server; the latter needs the role `storage`.
        zone: Failure domain (`topology.kubernetes.io/zone`); empty: unknown. Near peers are
            preferred.
        node: Machine; empty: unknown.
        load: 0 (idle) to 1 (full).
        ttl_ms: The lease requested, in milliseconds; the broker may grant less. null: its default.
        draining: The peer accepts no new pulls in this incarnation.
        drain: Progress of its drain; null or absent: not reported.
        figures: Its counters; null or absent: not reported.

    Raises:
        ValueError: The URL is malformed.
    """

    incarnation: Incarnation
    distributed_url: str
    kind: PeerKind = "sidecar"
    zone: TopologyName = ""
    node: TopologyName = ""
    load: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    ttl_ms: Annotated[int, msgspec.Meta(ge=100, lt=1 << 53)] | None = None
    draining: bool = False
    drain: DrainReport | msgspec.UnsetType | None = msgspec.UNSET
    figures: PeerFigures | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        parse_distributed_url(self.distributed_url)


class HeldBy(NamedTuple):
    """A possible holder of a chunk, and the tier that holds it."""

    instance: str
    tier: str


class ChunkHolders(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chunk and the instances that may hold it.

    Attributes:
        chunk_id: 32 hex digits.
        holders: Ids of the instances, as lookup names them.
        tiers: The tier at each holder, one per holder; empty: unknown. Memory is preferred to disk.
    """

    chunk_id: ChunkIdText
    holders: Annotated[list[InstanceText], msgspec.Meta(max_length=MAX_HOLDERS_PER_CHUNK)]
    tiers: Annotated[list[TierText], msgspec.Meta(max_length=MAX_HOLDERS_PER_CHUNK)] = []


class TransferRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Chunks that an instance wants to pull; body of `POST /v1/transfers`.

    Attributes:
        requester: The instance that will pull.
        chunks: Distinct chunks.
        wait_ms: Milliseconds to wait for a holder while all are busy.
    """

    requester: InstanceText
    chunks: Annotated[list[ChunkHolders], msgspec.Meta(max_length=MAX_CHUNKS_PER_TRANSFER)]
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_MS)] = 0


class PullsRequest(msgspec.Struct, frozen=True):
    """Pulls of one requester; body of `POST /v1/transfers:renew` and `POST /v1/transfers:done`.

    Attributes:
        requester: The instance that pulls.
        pulls: Ids of the pulls, from `Assignment.pull`.
    """

    requester: InstanceText
    pulls: Annotated[list[PullId], msgspec.Meta(max_length=MAX_CHUNKS_PER_TRANSFER)]


class Assignment(msgspec.Struct, frozen=True):
    """One pull that the broker has granted.

    Attributes:
        instance: The serving instance.
        distributed_url: Its address.
        chunk_ids: 32 hex digits each, in the order of the request.
        ticket: To present to the serving instance. Secret until it expires.
        expires_ms: Expiry of the ticket, Unix time in milliseconds.
        pull: Its id in `/v1/transfers:renew` and `/v1/transfers:done`.
        ttl_ms: Remaining lifetime of the ticket, in milliseconds.
    """

    instance: ShortText
    distributed_url: ShortText
    chunk_ids: Annotated[
        list[ChunkIdText], msgspec.Meta(min_length=1, max_length=MAX_CHUNKS_PER_TRANSFER)
    ]
    ticket: TicketText
    expires_ms: PositiveMs
    pull: Annotated[str, msgspec.Meta(max_length=64)] = ""
    ttl_ms: BoundedCount = 0

    def __repr__(self) -> str:
        return (
            f"Assignment(instance={self.instance!r}, distributed_url={self.distributed_url!r},"
            f" num_chunks={len(self.chunk_ids)})"
        )


class Renewal(msgspec.Struct, frozen=True):
    """A renewed pull.

    Attributes:
        pull: Its `Assignment.pull`.
        ticket: Replaces the previous ticket. Secret until it expires.
        expires_ms: Expiry of the ticket, Unix time in milliseconds.
        ttl_ms: Remaining lifetime of the ticket, in milliseconds.
    """

    pull: Annotated[str, msgspec.Meta(max_length=64)]
    ticket: TicketText
    expires_ms: PositiveMs
    ttl_ms: PositiveMs

    def __repr__(self) -> str:
        return f"Renewal(pull={self.pull!r}, ttl_ms={self.ttl_ms})"


class RenewResponse(msgspec.Struct, frozen=True):
    """Pulls that were renewed: the requester's unfinished ones, at peers that are still live.

    Attributes:
        renewed: One for each renewed pull. Those that are missing have ended, or lasted ten
            minutes: request their chunks again.
    """

    renewed: Annotated[tuple[Renewal, ...], msgspec.Meta(max_length=MAX_CHUNKS_PER_TRANSFER)] = ()


class TransferResponse(msgspec.Struct, frozen=True):
    """Every chunk of the request, either in one assignment or unassigned.

    Attributes:
        assignments: One for each serving peer.
        unassigned: Chunks that no live holder can serve now.
        busy: Those of them whose live holders are at their bound of pulls.
    """

    assignments: Annotated[list[Assignment], msgspec.Meta(max_length=MAX_CHUNKS_PER_TRANSFER)]
    unassigned: list[str] = []
    busy: list[str] = []


class PeersResponse(msgspec.Struct, frozen=True):
    """The live peers that the caller may see.

    Attributes:
        peers: Those of its tenant and the shared ones, by id.
    """

    peers: Annotated[list[PeerStatus], msgspec.Meta(max_length=MAX_PEERS_PER_LISTING)]


def bounded_count(count: int) -> int:
    """Return a count as a heartbeat accepts it."""
    return min(max(count, 0), MAX_COUNT)


def bounded(counts: Mapping[str, int], max_names: int = MAX_COUNTED_LABELS) -> dict[str, int]:
    """Return the largest of these counts, at most `max_names`, with names that a heartbeat
    accepts.
    """
    named = (
        (name, bounded_count(count))
        for name, count in counts.items()
        if 0 < len(name) <= MAX_LABEL_CHARS
    )
    return dict(sorted(named, key=lambda entry: (-entry[1], entry[0]))[:max_names])


def tier_figures(stats: Mapping[str, Mapping[str, int]]) -> tuple[TierFigures, ...]:
    """Return the fill levels of tiers.

    Args:
        stats: `StorageBackend.stats` of each, by its name.
    """
    return tuple(
        TierFigures(
            name,
            bounded_count(figures.get("num_chunks", 0)),
            bounded_count(figures.get("used_bytes", 0)),
            bounded_count(figures.get("capacity_bytes", 0)),
        )
        for name, figures in list(stats.items())[:MAX_TIERS]
    )
