"""`/v1/explain`: where chunks are, and why they are missing."""

from __future__ import annotations

from itertools import takewhile
from typing import Annotated

from fastapi import APIRouter, Depends
from lmcache_core.keys import MAX_TOKEN_ID
from lmcache_core.wire.messages import Describe
from lmcache_servicekit.auth import GuardedRoute, RoleRequired
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lmcache_sidecar.admin.pins import ChunkHashes, ModelName
from lmcache_sidecar.descriptions import ChunkNamer, namers
from lmcache_sidecar.explainer import PlaceState
from lmcache_sidecar.sidecar import RunningSidecar, SidecarNode

MAX_EXPLAINED_TOKENS = 131_072
MAX_EXPLANATIONS = 4

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


router = APIRouter(
    prefix="/v1",
    tags=["explain"],
    dependencies=[Depends(RoleRequired("admin"))],
    route_class=GuardedRoute,
)


@router.post("/explain", summary="Explain where chunks are, or why they are missing")
async def explain(sidecar: RunningSidecar, request: ExplainRequest) -> ExplainAnswer:
    """Asks every tier, without counting as a read. Loopback only (403).

    Token ids are never logged. 409 before an engine has connected.
    """
    sidecar.require_loopback()
    known = sidecar.descriptions.of(request.model)
    if request.token_ids is None:  # a hash holds the identity already
        known = list(
            {
                (one.fmt, one.model_name, one.world_size, one.groups): one
                for one in reversed(known)
            }.values()
        )[::-1]
    able = namers(sidecar.settings.tenant, known, lambda namer: _check(namer, request))
    explained = [
        await _explain(sidecar, request, one, namer) for one, namer in able[:MAX_EXPLANATIONS]
    ]
    return ExplainAnswer(explanations=explained, num_not_explained=len(known) - len(explained))


def _check(namer: ChunkNamer, request: ExplainRequest) -> None:
    if request.token_ids is None:
        namer.check_chunks(len(request.chunk_hashes or ()))
    else:
        namer.check_tokens(len(request.token_ids))


async def _explain(
    sidecar: SidecarNode, request: ExplainRequest, known: Describe, namer: ChunkNamer
) -> Explanation:
    chunks = (
        namer.of_hashes(request.chunk_hashes or ())
        if request.token_ids is None
        else namer.of_tokens(request.token_ids)
    )
    keys = [key for chunk in chunks for key in chunk.keys]
    states = iter(zip(keys, await sidecar.explainer.states(keys), strict=True))
    views = []
    for chunk in chunks:
        of_chunk = [
            StateView(
                rank=key.key.worker_id,
                group=key.key.group,
                places=[PlaceView.model_validate(place) for place in state.places],
                missing=state.missing,
                is_pinned=key in sidecar.pins,
            )
            for _, (key, state) in zip(chunk.keys, states, strict=False)
        ]
        is_complete = all(state.missing is None for state in of_chunk)
        views.append(
            ChunkView(
                chunk_hash=chunk.chunk_hash,
                start=chunk.start,
                end=chunk.end,
                is_complete=is_complete,
                states=of_chunk,
            )
        )
    return Explanation(
        fmt=known.fmt,
        model_name=known.model_name,
        world_size=known.world_size,
        chunk_size=known.chunk_size,
        groups=list(known.groups),
        num_prefix=len(list(takewhile(lambda view: view.is_complete, views))),
        chunks=views,
    )
