"""JSON of `/v1/overview`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from lmcache_broker.peers.schemas import PeerView, TierBody


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
        description="Bytes of chunks that nobody else holds, as far as the peer knows."
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

    model_config = ConfigDict(from_attributes=True)

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
