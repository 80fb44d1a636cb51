"""JSON bodies of the broker's REST interface.

Unknown fields are ignored: a newer peer must be able to register.
"""

from __future__ import annotations

from typing import Annotated, Final, Self

from fastapi import Path
from lmcache_core.names import INSTANCE_PATTERN
from lmcache_core.p2p import (
    Peer,
    PeerFigures,
    PeerKind,
    TierFigures,
    parse_distributed_url,
)
from lmcache_core.p2p.messages import (
    MAX_CHUNKS_PER_TRANSFER,
    MAX_COUNTED_LABELS,
    MAX_COUNTED_PEERS,
    MAX_HOLDERS_PER_CHUNK,
    MAX_LABEL_CHARS,
    MAX_TIERS,
)
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from lmcache_broker.transfers.choice import WantedFrom

MAX_WAIT_MS: Final = 10_000

InstanceId = Annotated[str, StringConstraints(pattern=f"^{INSTANCE_PATTERN}$")]
PeerIdPath = Annotated[str, Path(pattern=f"^{INSTANCE_PATTERN}$", description="The peer's id.")]
ChunkCount = Annotated[int, Field(ge=0, lt=1 << 53)]
FigureName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LABEL_CHARS)]
Counts = Annotated[dict[FigureName, ChunkCount], Field(max_length=MAX_COUNTED_LABELS)]
TopologyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,253}$")]


def _check_distributed_url(url: str) -> str:
    parse_distributed_url(url)
    return url


DistributedUrlText = Annotated[str, AfterValidator(_check_distributed_url)]


class DrainBody(BaseModel):
    """How far a peer is on its way to its end; `total` is the sum of the other numbers."""

    model_config = ConfigDict(strict=True, from_attributes=True)

    state: Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,32}$")]
    total: ChunkCount
    handed_over: ChunkCount
    already_elsewhere: ChunkCount
    failed: ChunkCount
    left: ChunkCount


class TierBody(BaseModel):
    """How full a tier is."""

    model_config = ConfigDict(strict=True, from_attributes=True)

    name: FigureName
    num_chunks: ChunkCount
    used_bytes: ChunkCount
    capacity_bytes: ChunkCount = Field(description="0 where the peer does not know it.")


class FiguresBody(BaseModel):
    """What a peer has done since its start, and what it holds; all of it may be left out."""

    model_config = ConfigDict(strict=True, from_attributes=True)

    requested_chunks: ChunkCount = Field(0, description="Chunks that engines wanted.")
    loaded_chunks: Counts = Field({}, description="Chunks that they got, by tier.")
    loaded_bytes: Counts = Field({}, description="Bytes of these, by tier.")
    missed_chunks: Counts = Field({}, description="Chunks that they did not get, by reason.")
    stored_chunks: ChunkCount = Field(0, description="Chunks that engines stored.")
    stored_bytes: ChunkCount = Field(0, description="Bytes of these.")
    pulled_bytes: dict[FigureName, ChunkCount] = Field(
        {}, max_length=MAX_COUNTED_PEERS, description="Bytes that peers sent, by their id."
    )
    tiers: list[TierBody] = Field([], max_length=MAX_TIERS)
    sole_bytes: ChunkCount | None = Field(
        None, description="Bytes of chunks without another holder, as far as the peer knows."
    )

    def to_figures(self) -> PeerFigures:
        """Return the domain's view of it."""
        fields = self.model_dump()
        return PeerFigures(
            **fields | {"tiers": tuple(TierFigures(**tier) for tier in fields["tiers"])}
        )


class AnnounceBody(BaseModel):
    """What a peer says of itself."""

    model_config = ConfigDict(strict=True)

    incarnation: int = Field(ge=0, lt=1 << 63, description="Rises with every start of the peer.")
    distributed_url: DistributedUrlText = Field(description="lm://host:port")
    kind: PeerKind = "sidecar"
    zone: TopologyName = ""
    node: TopologyName = ""
    load: float = Field(
        0.0, ge=0.0, le=1.0, allow_inf_nan=False, description="0 is idle, 1 is full."
    )
    ttl_ms: int | None = Field(
        None, ge=100, lt=1 << 53, description="The lease asked for; the broker may grant less."
    )
    draining: bool = Field(False, description="The peer wants no new pulls in this incarnation.")
    drain: DrainBody | None = Field(None, description="How far the peer is on its way to its end.")
    figures: FiguresBody | None = Field(None, description="What the peer has done and holds.")

    def to_peer(self, peer_id: str) -> Peer:
        """Return the domain's view of it."""
        return Peer(
            id=peer_id,
            incarnation=self.incarnation,
            distributed_url=self.distributed_url,
            kind=self.kind,
            zone=self.zone,
            node=self.node,
        )


class CopyView(BaseModel):
    """A chunk that another peer should have too."""

    model_config = ConfigDict(from_attributes=True)

    chunk_id: str
    instance: str
    distributed_url: str


class LeaseView(BaseModel):
    """The lease that was granted."""

    model_config = ConfigDict(from_attributes=True)

    ttl_ms: int
    draining: bool
    copies: list[CopyView] = Field(
        description="Chunks of the peer that many ask for, and who should have them too."
    )


class PeerView(BaseModel):
    """A live peer."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    incarnation: int
    distributed_url: str
    kind: PeerKind
    zone: str
    node: str
    load: float
    draining: bool
    num_pulls: int = Field(description="Tickets to it that have not expired.")
    expires_in_ms: int = Field(description="What is left of its lease.")
    drain: DrainBody | None = Field(
        description="How far it is on its way to its end, if it has said so."
    )


class PeersView(BaseModel):
    """The live peers that the caller may see."""

    peers: list[PeerView]


class StatsView(BaseModel):
    """Figures of the peers that the caller may see."""

    num_peers: int
    num_draining: int
    num_pulls: int = Field(description="Tickets that have not expired.")
    max_pulls_per_peer: int
    num_waiting: int = Field(description="Requests, of all tenants, that wait for a place.")
    is_shared: bool = Field(description="Whether this broker knows now what the others know.")


ChunkId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
TierName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]
PullId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class WantedChunk(BaseModel):
    """A chunk and who may hold it."""

    model_config = ConfigDict(strict=True)

    chunk_id: ChunkId
    holders: list[InstanceId] = Field(max_length=MAX_HOLDERS_PER_CHUNK)
    tiers: list[TierName] = Field(
        [],
        max_length=MAX_HOLDERS_PER_CHUNK,
        description="Where it lies at each holder: as many, or none.",
    )

    @model_validator(mode="after")
    def _tiers_belong_to_holders(self) -> Self:
        if self.tiers and len(self.tiers) != len(self.holders):
            raise ValueError("tiers names one for each holder, or is left out")
        return self


class TransferBody(BaseModel):
    """What one instance wants to pull."""

    model_config = ConfigDict(strict=True)

    requester: InstanceId
    chunks: list[WantedChunk] = Field(max_length=MAX_CHUNKS_PER_TRANSFER)
    wait_ms: int = Field(
        0,
        ge=0,
        le=MAX_WAIT_MS,
        description="How long to wait for a holder while all of them are busy.",
    )

    @model_validator(mode="after")
    def _chunks_are_distinct(self) -> Self:
        if len({chunk.chunk_id for chunk in self.chunks}) != len(self.chunks):
            raise ValueError("a chunk id appears twice")
        return self

    def wanted(self) -> dict[str, WantedFrom]:
        """Return who may hold each chunk, in the order of the request."""
        return {chunk.chunk_id: WantedFrom(chunk.holders, chunk.tiers) for chunk in self.chunks}


class PullsBody(BaseModel):
    """Pulls of one requester."""

    model_config = ConfigDict(strict=True)

    requester: InstanceId
    pulls: list[PullId] = Field(max_length=MAX_CHUNKS_PER_TRANSFER)


class DoneView(BaseModel):
    """What became of it."""

    num_ended: int = Field(description="Those that were underway and the requester's.")


class RenewedView(BaseModel):
    """A pull that goes on."""

    model_config = ConfigDict(from_attributes=True)

    pull: str
    ticket: str = Field(description="To be shown to the serving peer from now on.")
    expires_ms: int = Field(description="End of the ticket, Unix time in milliseconds.")
    ttl_ms: int = Field(description="Life of the ticket.")


class RenewView(BaseModel):
    """What became of it."""

    renewed: list[RenewedView] = Field(
        description="Those that were underway and the requester's, at peers that are there still."
    )


class AssignmentView(BaseModel):
    """Chunks that one peer serves."""

    model_config = ConfigDict(from_attributes=True)

    instance: str
    distributed_url: str
    chunk_ids: list[str]
    ticket: str = Field(description="To be shown to the serving peer.")
    expires_ms: int = Field(description="End of the ticket, Unix time in milliseconds.")
    pull: str = Field(
        description="What to call it by in `/v1/transfers:renew` and `/v1/transfers:done`."
    )
    ttl_ms: int = Field(description="Life of the ticket.")


class TransferView(BaseModel):
    """Every chunk of the request, in exactly one place."""

    model_config = ConfigDict(from_attributes=True)

    assignments: list[AssignmentView]
    unassigned: list[str] = Field(description="Chunks that no live holder can serve now.")
    busy: list[str] = Field(
        description="Those of them whose live holders serve as many pulls as they may."
    )


class SeenFiguresView(BaseModel):
    """What a peer has done since its start, and what it holds. From whom it pulled is told by
    the links.
    """

    requested_chunks: int
    loaded_chunks: dict[str, int] = Field(description="By tier.")
    loaded_bytes: dict[str, int] = Field(description="By tier.")
    missed_chunks: dict[str, int] = Field(description="By reason.")
    stored_chunks: int
    stored_bytes: int
    tiers: list[TierBody]
    sole_bytes: int | None = Field(
        description="Bytes of chunks without another holder, as far as the peer knows."
    )


class SeenPeerView(PeerView):
    """A live peer, and its work."""

    figures: SeenFiguresView | None = Field(
        description="What it has done since its start and holds now, if it says so."
    )


class LinkView(BaseModel):
    """Who pulls from whom."""

    requester: str
    server: str
    num_bytes: int = Field(description="That came since the requester's start.")


class WorkView(BaseModel):
    """What engines asked for and got."""

    requested_chunks: int
    loaded_chunks: dict[str, int] = Field(description="By tier.")
    loaded_bytes: dict[str, int] = Field(description="By tier.")
    missed_chunks: dict[str, int] = Field(description="By reason.")
    stored_bytes: int


class SampleView(BaseModel):
    """One interval."""

    ended_ms: int = Field(description="Unix time in milliseconds.")
    work: WorkView


class HotChunkView(BaseModel):
    """A chunk that peers pull. Its id stands for its whole prefix: it is a hash of all tokens up
    to its end.
    """

    chunk_id: str
    num_pulls: int = Field(description="Granted by this broker within the last minute.")


class OverviewView(BaseModel):
    """The caller's tenant's peers and the shared ones, as this broker knows them."""

    time_ms: int = Field(description="Unix time in milliseconds.")
    broker: str = Field(description="Who tells this.")
    shares: bool = Field(description="Whether this broker is to know what the others know.")
    is_shared: bool = Field(description="Whether this broker knows now what the others know.")
    num_peers: int
    peers: list[SeenPeerView] = Field(description="Those that drain first; at most 256.")
    links: list[LinkView] = Field(description="The strongest; at most 512.")
    totals: WorkView = Field(description="Of all these peers since the start of each.")
    interval_s: float = Field(description="Length of a sample.")
    samples: list[SampleView] = Field(
        description="The latest intervals since this broker's start, the oldest first; at most 360."
    )
    hot_chunks: list[HotChunkView] = Field(
        description="The chunks that are pulled most; at most 10."
    )
