"""Bodies of the routes that pin chunks."""

from __future__ import annotations

from typing import Annotated

from lmcache_core.security import validate_tenant
from lmcache_core.storage.pin_board import MAX_PINNED_CHUNKS, PinnedChunk
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lmcache_storage.chunks.schemas import UrlKey

MAX_TTL_S = 86_400
DEFAULT_TTL_S = 600

Tenant = Annotated[str, AfterValidator(validate_tenant)]
UrlKeys = Annotated[list[UrlKey], Field(min_length=1, max_length=MAX_PINNED_CHUNKS)]


class PinRequest(BaseModel):
    """What to keep in memory, and for how long."""

    model_config = ConfigDict(extra="forbid")

    keys: UrlKeys
    ttl_s: float = Field(DEFAULT_TTL_S, gt=0, le=MAX_TTL_S)
    tenant: Tenant | None = Field(
        None, description="Whose chunks: those of the caller's tenant where nothing is said"
    )


class Unpinned(BaseModel):
    """One chunk that is not kept."""

    key: str
    reason: str = Field(
        description="Why it is missing here, or `pin_bound`: too much is pinned already"
    )


class PinAnswer(BaseModel):
    """What is kept now."""

    num_pinned: int = Field(description="Of the chunks asked for")
    not_pinned: list[Unpinned]
    pinned_bytes: int = Field(description="Of all pins together")
    max_pinned_bytes: int


class UnpinRequest(BaseModel):
    """What to keep no longer."""

    model_config = ConfigDict(extra="forbid")

    keys: UrlKeys | None = Field(None, description="Without it, everything of the tenant")
    tenant: Tenant | None = Field(
        None, description="Whose chunks: those of the caller's tenant where nothing is said"
    )


class UnpinAnswer(BaseModel):
    """What was let go."""

    num_unpinned: int


class PinView(BaseModel):
    """One chunk that is kept."""

    key: str
    tenant: str
    num_bytes: int
    expires_in_s: float

    @classmethod
    def of(cls, pinned: PinnedChunk) -> PinView:
        """As it is now."""
        key = pinned.key
        return cls(
            key=key.key.to_url(),
            tenant=key.tenant,
            num_bytes=pinned.num_bytes,
            expires_in_s=round(pinned.expires_in_s, 3),
        )


class Pins(BaseModel):
    """Everything that is kept, of all tenants."""

    pins: list[PinView]
    pinned_bytes: int
    max_pinned_bytes: int
