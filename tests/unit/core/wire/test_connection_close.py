"""The end of a wire connection has a bound, whatever its reader does."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from lmcache_core.wire.connection import ClientConnection
from lmcache_core.wire.frames import FrameHeader, FrameType
from lmcache_core.wire.messages import HelloOk


class StubbornStream:
    """Answers HELLO; then its reader ignores cancellations until it is let go."""

    is_open = True

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.headers = [FrameHeader(FrameType.HELLO_OK, 1, 1, 0)]

    async def send_message(self, *_: object) -> None: ...

    async def read_header(self) -> FrameHeader:
        while not self.headers and not self.let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.let_go.wait()
        return self.headers.pop()

    async def read_message(self, _: FrameHeader) -> HelloOk:
        return HelloOk(1, "server", 4)

    def abort(self) -> None: ...

    async def wait_closed(self) -> None: ...


@pytest.mark.virtual_time
async def test_reader_that_ignores_its_cancellation_is_named_and_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = StubbornStream()
    connection = ClientConnection(stream, "server")  # type: ignore[arg-type]
    await connection.greet(None, "client")
    (reader,) = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.sleep(0)
    async with asyncio.timeout(60.0):
        await connection.close()
    assert "lm-client/server" in caplog.text
    stream.let_go.set()
    await asyncio.wait([reader])
    assert isinstance(reader.exception(), IndexError)
