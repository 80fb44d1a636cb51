"""Bodies of the admin routes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Status(BaseModel):
    """The sidecar at a glance."""

    instance: str
    distributed_url: str
    generation: str
    arena_bytes: int
    draining: bool
    num_clients: int
    registered: bool
    settled: bool = Field(description="Whether everything stored has reached the slower tiers and lookup")


class ClientStatus(BaseModel):
    """One client of the socket."""

    client: str
    pid: int
    rank: int
    model: str
    num_reservations: int
    reserved_bytes: int
    num_pins: int


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


class ClearAnswer(BaseModel):
    """What was forgotten."""

    num_chunks: int


class DrainAnswer(BaseModel):
    """How far the drain is."""

    draining: bool
    settled: bool
