"""The end of a wire connection has a bound, whatever its reader does."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from lmcache_core.concurrency import supervisor
from lmcache_core.wire.connection import ClientConnection
from lmcache_core.wire.stream import FrameStream


async def test_a_reader_that_ignores_its_cancellation_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "CANCEL_WAIT_S", 0.2)
    let_go = asyncio.Event()

    async def stubborn() -> None:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    connection = ClientConnection(FrameStream(), "server")
    reader = connection._reader = asyncio.create_task(stubborn(), name="lm-client/server")
    await asyncio.sleep(0)
    closing = asyncio.create_task(connection.close())
    done, _ = await asyncio.wait([closing], timeout=10)
    let_go.set()
    await asyncio.wait([reader, closing])
    assert done
    assert "lm-client/server" in caplog.text
