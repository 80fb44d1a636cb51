"""Bodies of lookup and route. Answers are encoded from `lmcache_core.lookup`'s messages; the models here document them."""

from __future__ import annotations

from typing import Annotated

from lmcache_core.lookup import InstanceKind
from pydantic import Field

from lmcache_lookup.schemas import AnswerBody, ChunkIds, InstanceId, RequestBody

MAX_EXCLUDED = 1024


class LookupBody(RequestBody):
    """Which chunks, in order, and whose holdings do not count."""

    chunk_ids: ChunkIds
    exclude: Annotated[list[InstanceId], Field(max_length=MAX_EXCLUDED, default_factory=list)]


class RouteBody(RequestBody):
    """Which chunks, in order."""

    chunk_ids: ChunkIds


class HolderBody(AnswerBody):
    """One holder of one chunk."""

    instance: str
    kind: InstanceKind
    tier: str
    size_bytes: int


class LookupAnswerBody(AnswerBody):
    """The longest prefix that somebody holds; `degraded` means that the index was away and nothing is known."""

    num_prefix: int
    holders: list[list[HolderBody]]
    degraded: bool


class RouteEntryBody(AnswerBody):
    """How long a prefix one instance holds by itself."""

    instance: str
    num_prefix: int


class RouteAnswerBody(AnswerBody):
    """Instances, longest prefix first; `degraded` as in a lookup's answer."""

    instances: list[RouteEntryBody]
    degraded: bool
