"""Bodies of events."""

from __future__ import annotations

from typing import Annotated, Literal

from lmcache_core.lookup import MAX_EVENTS_PER_BATCH
from lmcache_core.lookup.messages import MAX_SIZE_BYTES, TIER_PATTERN
from lmcache_core.security.names import TENANT_PATTERN
from pydantic import Field

from lmcache_lookup.schemas import AnswerBody, ChunkIdText, Incarnation, InstanceId, RequestBody, Sequence


class EventBody(RequestBody):
    """A chunk came to a tier of the instance, or went. Without `tenant` it is one of the caller's tenant."""

    op: Literal["store", "remove"]
    chunk_id: ChunkIdText
    tier: Annotated[str, Field(pattern=f"^{TIER_PATTERN}$")]
    size_bytes: Annotated[int, Field(ge=0, le=MAX_SIZE_BYTES)] = 0
    tenant: Annotated[str, Field(pattern=f"^{TENANT_PATTERN}$")] | None = None


class EventsBody(RequestBody):
    """Events with consecutive numbers from `first_sequence` on."""

    instance: InstanceId
    incarnation: Incarnation
    first_sequence: Sequence
    events: Annotated[list[EventBody], Field(max_length=MAX_EVENTS_PER_BATCH)]


class EventsAnswerBody(AnswerBody):
    """The event that is waited for now; `resync` asks for a higher incarnation and everything from the beginning."""

    next_sequence: int
    resync: bool
