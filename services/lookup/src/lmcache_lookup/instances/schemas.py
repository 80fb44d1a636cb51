"""Bodies of leases."""

from __future__ import annotations

from typing import Annotated

from lmcache_core.lookup import InstanceKind
from pydantic import Field

from lmcache_lookup.schemas import AnswerBody, Incarnation, RequestBody


class LeaseBody(RequestBody):
    """What an instance says of itself; without `ttl_ms` it gets the service's default."""

    incarnation: Incarnation
    kind: InstanceKind
    ttl_ms: Annotated[int, Field(ge=1, le=1 << 40)] | None = None


class LeaseAnswerBody(AnswerBody):
    """The granted lease, and the event that is waited for."""

    ttl_ms: int
    next_sequence: int
    resync: bool


class InstanceBody(AnswerBody):
    """A live lease."""

    instance: str
    kind: InstanceKind
    incarnation: int
    next_sequence: int
    expires_in_ms: int


class InstancesBody(AnswerBody):
    """The live leases that tokens of the caller's tenant took."""

    instances: list[InstanceBody]
