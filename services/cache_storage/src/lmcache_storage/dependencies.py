"""What routes ask for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from lmcache_storage.parts import StorageParts


def storage_parts(request: Request) -> StorageParts:
    """The running storage, which the lifespan has put into the app."""
    parts = request.app.state.storage
    assert isinstance(parts, StorageParts)
    return parts


Parts = Annotated[StorageParts, Depends(storage_parts)]
