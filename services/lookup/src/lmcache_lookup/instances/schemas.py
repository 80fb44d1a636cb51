"""Bodies of leases."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from lmcache_core.lookup.messages import (
    MAX_TTL_MS,
    Incarnation,
    InstanceKind,
    InstanceText,
    Sequence,
)
from lmcache_core.lookup.requests import LeaseRequest

from lmcache_lookup.formats import Body

MAX_LEASES: Final = 65_536

LEASE: Final = Body(LeaseRequest, LeaseRequest)


class InstanceEntry(msgspec.Struct, frozen=True):
    """A live lease."""

    instance: InstanceText
    kind: InstanceKind
    incarnation: Incarnation
    next_sequence: Sequence
    expires_in_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_TTL_MS)]


class InstancesAnswer(msgspec.Struct, frozen=True):
    """The live leases that tokens of the caller's tenant took."""

    instances: Annotated[list[InstanceEntry], msgspec.Meta(max_length=MAX_LEASES)]
