"""A wire connection: the wait before the next attempt, and an end that has a bound."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from lmcache_core.wire.backoff import Backoff
from lmcache_core.wire.connection import ClientConnection
from lmcache_core.wire.frames import FrameHeader, FrameType
from lmcache_core.wire.messages import HelloOk

from tests.fixtures.held_clock import HeldClock


def test_wait_doubles_up_to_its_cap_and_starts_over_after_a_success() -> None:
    backoff = Backoff(0.1, 1.0, HeldClock(), jitter=lambda: 1.0)
    assert backoff.wait_s == 0
    waits: list[float] = []
    for _ in range(6):
        backoff.failed()
        waits.append(round(backoff.wait_s, 6))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for _ in range(5000):  # without an overflow
        backoff.failed()
    backoff.succeeded()
    assert backoff.wait_s == 0
    backoff.failed()
    assert round(backoff.wait_s, 6) == 0.1


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


def test_jitter_takes_up_to_half_of_a_wait_away_and_time_the_rest() -> None:
    clock = HeldClock()
    backoff = Backoff(1.0, 10.0, clock, jitter=lambda: 0.0)
    backoff.failed()
    assert backoff.wait_s == 0.5
    clock.now_s += 0.25
    assert backoff.wait_s == 0.25
    clock.now_s += 1
    assert backoff.wait_s == 0
