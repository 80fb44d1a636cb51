"""Bodies of the admin routes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from lmcache_sidecar.handover import DrainState

LocalTier = Literal["Hot", "LocalDiskBackend"]


class DrainView(BaseModel):
    """How far the drain is; `total` is the sum of the four figures behind it."""

    model_config = ConfigDict(from_attributes=True)

    state: DrainState
    total: int = Field(description="Chunks held when it began")
    handed_over: int = Field(description="Chunks that storage or a peer has taken")
    already_elsewhere: int = Field(description="Chunks that somebody else held already")
    failed: int = Field(description="Chunks that no receiver took, or that could not be read")
    left: int = Field(description="Chunks not dealt with, so far or in time")


class RecoveryView(BaseModel):
    """What an earlier start has left in shared memory."""

    model_config = ConfigDict(from_attributes=True)

    is_over: bool
    found_chunks: int = Field(description="Chunks in memory when this process began")
    checked_chunks: int = Field(
        description="Those of them that have been compared with their digest"
    )
    recovered_chunks: int = Field(description="Those that are served again")
    damaged_chunks: int = Field(description="Those that were not what was stored")
    dropped_chunks: int = Field(
        description="Those that were too old, above a quota, or stored anew meanwhile"
    )


class ArenaView(BaseModel):
    """Shared memory across restarts of the sidecar."""

    model_config = ConfigDict(from_attributes=True)

    is_recorded: bool = Field(
        description="Whether what is in memory now will be found by the next start"
    )
    lent_bytes: int = Field(
        description="What clients of earlier starts may still write to; used by nobody"
    )
    recovery: RecoveryView


class Status(BaseModel):
    """The sidecar at a glance."""

    instance: str
    version: str
    uptime_s: float
    distributed_url: str
    generation: str
    arena_bytes: int
    arena: ArenaView
    verify_hot: str
    accepts_handover: bool = Field(description="Whether peers may hand over chunks just now")
    draining: bool
    drain: DrainView
    num_clients: int
    registered: bool | None = Field(
        description="Whether lookup and broker know this sidecar now; null: none are configured"
    )
    settled: bool = Field(
        description="Whether everything stored has reached the slower tiers and lookup"
    )
    pending_bytes: int = Field(description="Bytes that wait to be written to slower tiers")
    reserved_bytes: int = Field(description="Arena memory that engines are filling")
    held_bytes: int = Field(description="Arena memory that is kept for engines: pinned or staged")
    pinned_bytes: int = Field(description="Arena memory that operators keep (`POST /v1/pin`)")


class Description(BaseModel):
    """How a client names KV."""

    model_config = ConfigDict(from_attributes=True)

    fmt: str
    model_name: str
    world_size: int
    chunk_size: int
    groups: list[str]


class ClientStatus(BaseModel):
    """One client of the socket."""

    client: str
    pid: int
    rank: int
    world_size: int
    model: str
    num_reservations: int
    reserved_bytes: int
    num_pins: int
    pinned_bytes: int
    num_tickets: int
    descriptions: list[Description]


class Clients(BaseModel):
    """Clients that are connected now."""

    clients: list[ClientStatus]


class Tiers(BaseModel):
    """Figures by tier."""

    tiers: dict[str, dict[str, int]]


class Chunks(BaseModel):
    """A page of the chunks in shared memory."""

    chunks: list[str] = Field(description="Keys in their URL spelling")
    next_offset: int | None


class EvictRequest(BaseModel):
    """How much shared memory to free."""

    model_config = ConfigDict(extra="forbid")

    num_bytes: int = Field(gt=0, le=1 << 50)


class EvictAnswer(BaseModel):
    """What was freed."""

    freed_bytes: int


class ClearRequest(BaseModel):
    """Which tiers forget what they hold."""

    model_config = ConfigDict(extra="forbid")

    tiers: list[LocalTier] | None = Field(
        None, min_length=1, description="Without it, all tiers of this pod"
    )


class ClearAnswer(BaseModel):
    """What was forgotten."""

    num_chunks: int


class DrainAnswer(BaseModel):
    """How far the drain is."""

    draining: bool
    settled: bool
    drain: DrainView
