"""Bodies that are pulled, not buffered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from lmcache_storage.problems import SlowClientError


async def record_body(request: Request) -> AsyncIterator[bytes]:
    """The body in pieces, as they come. Raises `SlowClientError` where the client goes away before its end."""
    return _pieces(request)


RecordBody = Annotated[AsyncIterator[bytes], Depends(record_body)]


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect as exc:
        raise SlowClientError("the client went away in the middle of its body") from exc
