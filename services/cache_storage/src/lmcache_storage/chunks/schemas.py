"""Bodies of the chunk routes."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

MAX_KEYS: Final = 4096
MAX_URL_KEY_CHARS: Final = 6000

UrlKey = Annotated[
    str, Field(min_length=1, max_length=MAX_URL_KEY_CHARS, description="A key in its URL spelling")
]


class Keys(BaseModel):
    """Chunks that are asked about."""

    model_config = ConfigDict(extra="forbid")

    keys: list[UrlKey] = Field(max_length=MAX_KEYS)


class Present(BaseModel):
    """Which of them are here, in the order of the keys."""

    present: list[bool]


class ListedChunk(BaseModel):
    """One chunk."""

    key: str
    size_bytes: int
    tiers: list[str]


class ListedChunks(BaseModel):
    """A page of the caller's chunks."""

    chunks: list[ListedChunk]
    next_offset: int | None
