"""Bodies of figures and upkeep."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from lmcache_core.lookup.messages import TenantText
from lmcache_core.lookup.requests import EvictRequest, PackedEvictRequest

from lmcache_lookup.formats import Body

MAX_TENANTS_PER_ANSWER: Final = 1024

EVICT: Final = Body(EvictRequest, PackedEvictRequest)

Count = Annotated[int, msgspec.Meta(ge=0)]


class StatsAnswer(msgspec.Struct, frozen=True):
    """Figures of one tenant; without the index they are missing and `degraded` is set."""

    index: str
    degraded: bool
    num_chunks: Count | None
    num_instances: Count | None


class TenantsAnswer(msgspec.Struct, frozen=True):
    """Tenants in whose namespaces chunks were stored, sorted; `next_after` is where to go on,
    null at the end.
    """

    tenants: Annotated[list[TenantText], msgspec.Meta(max_length=MAX_TENANTS_PER_ANSWER)]
    next_after: TenantText | None


class EvictedAnswer(msgspec.Struct, frozen=True):
    """How many of the chunks were known."""

    num_evicted: Count
