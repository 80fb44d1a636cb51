"""Request and response bodies of the admin routes of every node: evict, clear, drain, pins."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from lmcache_core.storage.pin_board import PinBoard
from pydantic import BaseModel, ConfigDict, Field

from lmcache_node.drain import DrainState

MAX_TTL_S = 86_400
DEFAULT_TTL_S = 600

Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S)]
Wait = Annotated[
    bool,
    Query(description="Answer when the drain is done, or after `drain_timeout_s`; else at once."),
]


class DrainView(BaseModel):
    """Progress of the drain. `total` is the sum of the four figures after it."""

    model_config = ConfigDict(from_attributes=True)

    state: DrainState
    total: int = Field(description="Chunks held when it began")
    handed_over: int = Field(description="Chunks accepted by another instance or storage")
    already_elsewhere: int = Field(description="Chunks that another instance already held")
    failed: int = Field(description="Chunks that could not be read, or that no receiver accepted")
    left: int = Field(description="Chunks not processed, so far or in time")


class DrainAnswer(BaseModel):
    """Progress of the drain."""

    draining: bool
    settled: bool = Field(description="Whether everything stored has reached the slower tiers")
    drain: DrainView


class EvictBytesRequest(BaseModel):
    """How much memory to free."""

    model_config = ConfigDict(extra="forbid")

    num_bytes: int = Field(gt=0, le=1 << 50)


class EvictAnswer(BaseModel):
    """The result of an eviction."""

    freed_bytes: int


class ClearAnswer(BaseModel):
    """The result of a clear."""

    num_chunks: int = Field(description="Chunks in the tier that held the most of them")


class PinnedBytes(BaseModel):
    """Memory taken by pins."""

    pinned_bytes: int = Field(description="Total of all pins")
    max_pinned_bytes: int


class UnpinAnswer(BaseModel):
    """The result of unpinning."""

    num_unpinned: int


def pinned_bytes(board: PinBoard) -> dict[str, int]:
    """Return the fields of `PinnedBytes`."""
    return {"pinned_bytes": board.num_bytes, "max_pinned_bytes": board.max_bytes}
