"""JSON bodies of `/v1/peers`. Fields that we do not know are passed over: a newer peer must be
able to register.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from lmcache_core.p2p import (
    DrainReport,
    Peer,
    PeerFigures,
    PeerKind,
    TierFigures,
    parse_distributed_url,
)
from lmcache_core.p2p.figures import (
    MAX_COUNTED_LABELS,
    MAX_COUNTED_PEERS,
    MAX_LABEL_CHARS,
    MAX_TIERS,
)
from lmcache_core.security.names import INSTANCE_PATTERN
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

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

    def to_report(self) -> DrainReport:
        """The domain's view of it."""
        return DrainReport(**self.model_dump())


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
        None, description="Bytes of chunks that nobody else holds, as far as the peer knows."
    )

    def to_figures(self) -> PeerFigures:
        """The domain's view of it."""
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
        """The domain's view of it."""
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
