"""Request and response bodies of the admin routes of every node: evict, clear, drain, pins."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from lmcache_core.storage.pin_board import PinBoard
from lmcache_servicekit.docstrings import ApiModel
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
    """Progress of a drain. `total` is the sum of the four figures after it.

    Attributes:
        state: `serving`: none has begun; `writing`: pending writes to slower tiers are finished;
            `handing_over`: chunks are sent to other instances; `done`: complete, or out of time.
        total: Chunks held when it began; 0 before.
        handed_over: Chunks sent to another instance or to storage, and stored there.
        already_elsewhere: Chunks that another instance already held.
        failed: Chunks that could not be read, or that no receiver accepted.
        left: Chunks not processed, so far or in time.
    """

    model_config = ConfigDict(from_attributes=True)

    state: DrainState
    total: int
    handed_over: int
    already_elsewhere: int
    failed: int
    left: int


class DrainAnswer(ApiModel):
    """The node after the request.

    Attributes:
        draining: Whether a drain has begun and was not cancelled, or the broker sends no pulls
            here.
        settled: Whether everything stored has reached the slower tiers.
        drain: Progress of the current or the last drain.
    """

    draining: bool
    settled: bool
    drain: DrainView


class EvictBytesRequest(ApiModel):
    """How much memory to free.

    Attributes:
        num_bytes: Bytes to free at least, if that many can be.
    """

    model_config = ConfigDict(extra="forbid")

    num_bytes: int = Field(gt=0, le=1 << 50)


class EvictAnswer(ApiModel):
    """The result of an eviction.

    Attributes:
        freed_bytes: Bytes of memory freed; less than requested if the rest is pinned or in use.
    """

    freed_bytes: int


class ClearAnswer(ApiModel):
    """The result of a clear.

    Attributes:
        num_chunks: Chunks removed from the tier that held the most of them.
    """

    num_chunks: int


class PinnedBytes(ApiModel):
    """Memory taken by pins.

    Attributes:
        pinned_bytes: Bytes of memory that all pins of this node take.
        max_pinned_bytes: Bytes that they may take: half of the memory for chunks.
    """

    pinned_bytes: int
    max_pinned_bytes: int


class UnpinAnswer(ApiModel):
    """The result of unpinning.

    Attributes:
        num_unpinned: How many chunks were pinned and are no longer.
    """

    num_unpinned: int


def pinned_bytes(board: PinBoard) -> dict[str, int]:
    """Return the fields of `PinnedBytes`."""
    return {"pinned_bytes": board.num_bytes, "max_pinned_bytes": board.max_bytes}
