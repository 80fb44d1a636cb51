"""Request and response bodies of the admin routes of every node: evict, clear, drain, pins."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from lmcache_core.storage.pin_board import PinBoard
from lmcache_servicekit.bodies import ApiModel
from pydantic import ConfigDict, Field

from lmcache_node.drain import DrainState

MAX_TTL_S = 86_400
DEFAULT_TTL_S = 600

Ttl = Annotated[
    float,
    Field(
        gt=0,
        le=MAX_TTL_S,
        description="Seconds until the pins end, also for chunks that are pinned already.",
    ),
]
Wait = Annotated[
    bool,
    Query(description="Answer when the drain is done, or after `drain_timeout_s`; else at once."),
]


class DrainView(ApiModel):
    """Progress of a drain. `total` is the sum of the four figures after it."""

    model_config = ConfigDict(from_attributes=True)

    state: DrainState
    """`serving`: none has begun; `writing`: pending writes to slower tiers are finished;
    `handing_over`: chunks are sent to other instances; `done`: complete, or out of time.
    """
    total: int
    """Chunks held when it began; 0 before."""
    handed_over: int
    """Chunks sent to another instance or to storage, and stored there."""
    already_elsewhere: int
    """Chunks that another instance already held."""
    failed: int
    """Chunks that could not be read, or that no receiver accepted."""
    left: int
    """Chunks not processed, so far or in time."""


class DrainAnswer(ApiModel):
    """The node after the request."""

    draining: bool
    """Whether a drain has begun and was not cancelled, or the broker sends no pulls here."""
    settled: bool
    """Whether everything stored has reached the slower tiers."""
    drain: DrainView
    """Progress of the current or the last drain."""


class EvictBytesRequest(ApiModel):
    """How much memory to free."""

    model_config = ConfigDict(extra="forbid")

    num_bytes: int = Field(gt=0, le=1 << 50)
    """Bytes to free at least, if that many can be."""


class EvictAnswer(ApiModel):
    """The result of an eviction."""

    freed_bytes: int
    """Bytes of memory freed; less than requested if the rest is pinned or in use."""


class ClearAnswer(ApiModel):
    """The result of a clear."""

    num_chunks: int
    """Chunks removed from the tier that held the most of them."""


class PinnedBytes(ApiModel):
    """Memory taken by pins."""

    pinned_bytes: int
    """Bytes of memory that all pins of this node take."""
    max_pinned_bytes: int
    """Bytes that they may take: half of the memory for chunks."""


class UnpinAnswer(ApiModel):
    """The result of unpinning."""

    num_unpinned: int
    """How many chunks were pinned and are no longer."""


def pinned_bytes(board: PinBoard) -> dict[str, int]:
    """Return the fields of `PinnedBytes`."""
    return {"pinned_bytes": board.num_bytes, "max_pinned_bytes": board.max_bytes}
