"""What an error of asking may show."""

from __future__ import annotations

import asyncio

import pytest
from lmcache_ctl.asking import Asker, Caller
from lmcache_ctl.errors import CtlError
from lmcache_ctl.options import CtlSettings
from lmcache_ctl.services import Endpoint, Kind


async def test_a_request_that_cannot_be_written_shows_no_token() -> None:
    """The HTTP library quotes the header that it refuses, and the header holds the token."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def question(caller: Caller) -> object:
        return await caller.get("/readyz")

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CtlError, match="not valid HTTP") as told:
            await Asker(CtlSettings()).one(
                Endpoint(Kind.STORAGE, "s", url, token="s3cret\nX"), question
            )
    assert "s3cret" not in str(told.value)
