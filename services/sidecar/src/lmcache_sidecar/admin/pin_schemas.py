"""Bodies of the routes that pin chunks."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_HASHES = 4096
MAX_TTL_S = 86_400
DEFAULT_TTL_S = 600

ChunkHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ChunkHashes = Annotated[list[ChunkHash], Field(min_length=1, max_length=MAX_HASHES)]
ModelName = Annotated[str, Field(min_length=1, max_length=1024)]


class PinRequest(BaseModel):
    """What to keep hot, and for how long."""

    model_config = ConfigDict(extra="forbid")

    chunk_hashes: ChunkHashes
    ttl_s: float = Field(DEFAULT_TTL_S, gt=0, le=MAX_TTL_S)
    model: ModelName | None = Field(None, description="Only as this model's engines name them")


class Unpinned(BaseModel):
    """One chunk of a rank and group that is not kept."""

    chunk_hash: str
    rank: int
    group: str
    reason: str = Field(description="Why it is missing, or `pin_bound`: too much is pinned already")


class PinAnswer(BaseModel):
    """What is kept now."""

    num_pinned: int = Field(description="Of the chunks asked for, counted for each rank and group")
    not_pinned: list[Unpinned]
    pinned_bytes: int = Field(description="Of all pins together")
    max_pinned_bytes: int


class UnpinRequest(BaseModel):
    """What to keep no longer."""

    model_config = ConfigDict(extra="forbid")

    chunk_hashes: ChunkHashes | None = Field(None, description="Without it, everything")


class UnpinAnswer(BaseModel):
    """What was let go."""

    num_unpinned: int


class PinView(BaseModel):
    """One chunk of a rank and group that is kept."""

    chunk_hash: str
    model_name: str
    rank: int
    group: str
    num_bytes: int
    expires_in_s: float


class Pins(BaseModel):
    """Everything that is kept."""

    pins: list[PinView]
    pinned_bytes: int
    max_pinned_bytes: int
