"""JSON bodies of `/v1/transfers`."""

from __future__ import annotations

from typing import Annotated, Self

from lmcache_core.p2p.messages import MAX_CHUNKS_PER_TRANSFER, MAX_HOLDERS_PER_CHUNK
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from lmcache_broker.peers.schemas import InstanceId
from lmcache_broker.transfers.choice import WantedFrom
from lmcache_broker.transfers.desk import MAX_WAIT_MS

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
        """By chunk id, in the order of the request."""
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
