"""Bodies that are pulled, not buffered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from lmcache_storage.problems import SlowClientError


@dataclass(slots=True)
class IncomingBody:
    """A request's body, as it comes.

    Attributes:
        request: Whose body.
        num_bytes: Its length as declared; None: it is not declared.
        num_received: Bytes that have come.
    """

    request: Request
    num_bytes: int | None
    num_received: int = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body in pieces. Raises `SlowClientError` where the client goes away before its
        end.
        """
        try:
            async for piece in self.request.stream():
                self.num_received += len(piece)
                yield piece
        except ClientDisconnect as exc:
            raise SlowClientError("the client went away in the middle of its body") from exc


async def record_body(request: Request) -> IncomingBody:
    """The body of that request."""
    declared = request.headers.get("content-length")
    return IncomingBody(request, None if declared is None else int(declared[:19]))


RecordBody = Annotated[IncomingBody, Depends(record_body)]
