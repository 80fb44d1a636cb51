"""Types that several slices share."""

from __future__ import annotations

from typing import Annotated

from lmcache_core.lookup import MAX_CHUNKS_PER_LOOKUP
from lmcache_core.security.names import INSTANCE_PATTERN
from pydantic import BaseModel, ConfigDict, Field

ChunkIdText = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", description="A chunk id: 32 hex digits.")]
ChunkIds = Annotated[list[ChunkIdText], Field(max_length=MAX_CHUNKS_PER_LOOKUP)]
InstanceId = Annotated[str, Field(pattern=f"^{INSTANCE_PATTERN}$", max_length=128)]
Sequence = Annotated[int, Field(ge=0, le=(1 << 53) - 1)]
Incarnation = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]


class RequestBody(BaseModel):
    """Base of request bodies. Fields that a newer client adds are ignored: the two may be one version apart."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class AnswerBody(BaseModel):
    """Base of answers."""

    model_config = ConfigDict(frozen=True)
