"""Bodies of the route that explains chunks."""

from __future__ import annotations

from typing import Annotated

from lmcache_core.keys import MAX_TOKEN_ID
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lmcache_sidecar.admin.pin_schemas import ChunkHashes, ModelName
from lmcache_sidecar.explainer import PlaceState

MAX_EXPLAINED_TOKENS = 131_072

TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
    Field(min_length=1, max_length=MAX_EXPLAINED_TOKENS),
]


class ExplainRequest(BaseModel):
    """Chunks, or the token ids of a prompt of text."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    chunk_hashes: ChunkHashes | None = None
    token_ids: TokenIds | None = None
    model: ModelName | None = Field(None, description="Only as this model's engines name them")

    @model_validator(mode="after")
    def _check_one(self) -> ExplainRequest:
        if (self.chunk_hashes is None) == (self.token_ids is None):
            raise ValueError("give chunk_hashes or token_ids, one of them")
        return self


class PlaceView(BaseModel):
    """A tier that has a chunk, or may have it."""

    model_config = ConfigDict(from_attributes=True)

    tier: str
    state: PlaceState = Field(
        description="refused: there, and not served for its encoding; unknown: no answer in time"
    )
    num_bytes: int | None = None
    age_s: float | None = None
    num_holders: int | None = Field(
        None, description="References on it: readers, pins, writes to slower tiers"
    )
    lossy: bool | None = Field(None, description="null: not known without reading it")
    peers: list[str] = Field(default_factory=list, description="Instances that hold it")


class StateView(BaseModel):
    """What became of a chunk of one rank and group."""

    rank: int
    group: str
    places: list[PlaceView] = Field(
        description="The fastest tier first; tiers that do not have it are left out"
    )
    missing: str | None = Field(description="Why no tier is known to have it")
    is_pinned: bool = Field(description="By `POST /v1/pin`")


class ChunkView(BaseModel):
    """One chunk."""

    chunk_hash: str
    start: int | None = Field(description="Its first token, where token ids were given")
    end: int | None = Field(description="Behind its last token")
    is_complete: bool = Field(description="Whether all ranks and groups are somewhere")
    states: list[StateView]


class Explanation(BaseModel):
    """The chunks, as engines of one model name them."""

    fmt: str
    model_name: str
    world_size: int
    chunk_size: int
    groups: list[str]
    num_prefix: int = Field(description="Complete chunks from the first on")
    chunks: list[ChunkView]


class ExplainAnswer(BaseModel):
    """One explanation for each way in which engines have named KV lately, the last one first."""

    explanations: list[Explanation]
    num_not_explained: int = Field(
        description="Further ways that were left out; name a model to see them"
    )
