"""What routes ask for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from lmcache_sidecar.parts import SidecarParts


async def sidecar_parts(request: Request) -> SidecarParts:
    """The running sidecar, which the lifespan has put into the app."""
    parts = request.app.state.sidecar
    assert isinstance(parts, SidecarParts)
    return parts


Parts = Annotated[SidecarParts, Depends(sidecar_parts)]
