"""JSON bodies of `/v1/transfers`."""

from __future__ import annotations

from typing import Annotated, Self

from lmcache_core.p2p.messages import MAX_CHUNKS_PER_TRANSFER, MAX_HOLDERS_PER_CHUNK
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from lmcache_broker.peers.schemas import InstanceId

ChunkId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class WantedChunk(BaseModel):
    """A chunk and who may hold it."""

    model_config = ConfigDict(strict=True)

    chunk_id: ChunkId
    holders: list[InstanceId] = Field(max_length=MAX_HOLDERS_PER_CHUNK)


class TransferBody(BaseModel):
    """What one instance wants to pull."""

    model_config = ConfigDict(strict=True)

    requester: InstanceId
    chunks: list[WantedChunk] = Field(max_length=MAX_CHUNKS_PER_TRANSFER)

    @model_validator(mode="after")
    def _chunks_are_distinct(self) -> Self:
        if len(self.holders_by_chunk()) != len(self.chunks):
            raise ValueError("a chunk id appears twice")
        return self

    def holders_by_chunk(self) -> dict[str, list[str]]:
        """Chunk ids in the order of the request."""
        return {chunk.chunk_id: chunk.holders for chunk in self.chunks}


class AssignmentView(BaseModel):
    """Chunks that one peer serves."""

    model_config = ConfigDict(from_attributes=True)

    instance: str
    distributed_url: str
    chunk_ids: list[str]
    ticket: str = Field(description="To be shown to the serving peer.")
    expires_ms: int = Field(description="End of the ticket, Unix time in milliseconds.")


class TransferView(BaseModel):
    """Every chunk of the request, in exactly one place."""

    model_config = ConfigDict(from_attributes=True)

    assignments: list[AssignmentView]
    unassigned: list[str] = Field(description="Chunks that no live holder can serve now.")
