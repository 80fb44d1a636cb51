"""Types of paths and queries that several slices share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from lmcache_core.lookup.messages import MAX_INCARNATION
from lmcache_core.security.names import INSTANCE_PATTERN, TENANT_PATTERN

ChunkIdInPath = Annotated[
    str, Path(pattern=r"^[0-9a-f]{32}$", description="A chunk id: 32 hex digits.")
]
InstanceInPath = Annotated[str, Path(pattern=f"^{INSTANCE_PATTERN}$", max_length=128)]
IncarnationInQuery = Annotated[int, Query(ge=0, le=MAX_INCARNATION)]
TenantInQuery = Annotated[str, Query(pattern=f"^{TENANT_PATTERN}$", max_length=63)]
