"""Bodies of the admin routes."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from lmcache_core.security import validate_tenant
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lmcache_storage.handover.drain import Drain
from lmcache_storage.handover.progress import DrainState


class DrainView(BaseModel):
    """How far the drain is. `total` is the sum of the other four."""

    state: DrainState
    total: int = Field(description="Chunks that this instance held when it began to hand them over")
    handed_over: int
    already_elsewhere: int
    failed: int = Field(description="Could not be read, or no other instance had room")
    left: int = Field(description="Not dealt with, so far or in time")

    @classmethod
    def of(cls, drain: Drain) -> DrainView:
        """As it is now."""
        return cls(state=drain.state, left=drain.moved.left, **dataclasses.asdict(drain.moved))


class Stats(BaseModel):
    """The storage at a glance."""

    instance: str
    advertise_url: str
    draining: bool
    settled: bool = Field(description="Whether everything stored has reached the disk and lookup")
    num_connections: int = Field(description="Open lm:// connections")
    tiers: dict[str, dict[str, int]]
    drain: DrainView
    replicas: list[str] | None = Field(
        description="The other instances, as they call themselves; null where none are configured"
    )
    reporter: dict[str, int] | None = Field(
        description="What lookup has been told; null without one"
    )


class EvictRequest(BaseModel):
    """How much host memory to free."""

    model_config = ConfigDict(extra="forbid")

    num_bytes: int = Field(gt=0, le=1 << 50)


class EvictAnswer(BaseModel):
    """What was freed."""

    freed_bytes: int


class ClearRequest(BaseModel):
    """Whose chunks to forget: those of the caller's tenant where nothing is said."""

    model_config = ConfigDict(extra="forbid")

    tenant: Annotated[str, AfterValidator(validate_tenant)] | None = None
    all_tenants: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> ClearRequest:
        if self.all_tenants and self.tenant is not None:
            raise ValueError("name one tenant or all_tenants, not both")
        return self


class ClearAnswer(BaseModel):
    """What was forgotten."""

    num_chunks: int = Field(description="Chunks in the tier that held most of them")


class DrainAnswer(BaseModel):
    """How far the drain is."""

    draining: bool
    settled: bool = Field(description="Whether everything stored has reached the disk")
    drain: DrainView
