"""Listeners of byte streams: which connections are served, which are turned away, and that closing
ends them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.wire.frames import FrameType
from lmcache_core.wire.listener import FrameListener
from lmcache_core.wire.messages import ErrorCode, ErrorMessage
from lmcache_core.wire.stream import FrameStream

from tests.fixtures.limits import without_descriptors
from tests.fixtures.wire import MemoryStore, RawConnection, connected, serving, until

BUSY = ErrorMessage(ErrorCode.BUSY.value, "too many connections")


class Talk:
    """A session that says one byte and lasts until its client goes, or until it is drained."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream

    async def run(self) -> None:
        with contextlib.suppress(UnavailableError):
            await self._stream.send(b"!")
            await self._stream.readinto(memoryview(bytearray(1)))
        self._stream.close()
        await self._stream.wait_closed()

    def drain(self) -> None:
        self._stream.close()


class Stubborn(Talk):
    """One that does not end when it is asked to."""

    def drain(self) -> None:
        return


class Listening:
    """A listener and whom it turned away."""

    def __init__(
        self,
        max_connections: int,
        goodbye: ErrorMessage | None,
        session: type[Talk],
        max_strangers: int = 0,
    ) -> None:
        self.turned_away: list[FrameStream] = []
        self.listener = FrameListener(
            "test listener",
            max_connections,
            session,
            self.turned_away.append,
            goodbye,
            max_strangers,
        )

    async def until_idle(self) -> None:
        await until(lambda: not self.listener.num_connections)


@asynccontextmanager
async def open_listener(
    max_connections: int = 2,
    goodbye: ErrorMessage | None = BUSY,
    session: type[Talk] = Talk,
    max_strangers: int = 0,
) -> AsyncIterator[Listening]:
    made = Listening(max_connections, goodbye, session, max_strangers)
    await made.listener.listen("127.0.0.1", 0)
    try:
        yield made
    finally:
        await made.listener.close()
        assert made.listener.num_connections == 0


async def heard(raw: RawConnection) -> bytes:
    async with asyncio.timeout(60):
        return await raw.reader.read(1)


async def test_connection_during_close_is_closed() -> None:
    """After so many turns of the loop the connection is still in the backlog, accepted, or its
    session about to begin.
    """
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    for num_turns in range(6):
        async with serving(MemoryStore()) as server:
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                await server.close()
                client.settimeout(60)
                with contextlib.suppress(ConnectionError):
                    assert client.recv(1) == b""
    gc.collect()  # reports what was left open
    assert not failures


@pytest.mark.parametrize("goodbye", [BUSY, None])
async def test_connection_beyond_the_limit_is_refused_or_closed(
    goodbye: ErrorMessage | None,
) -> None:
    async with open_listener(1, goodbye) as made, connected(made.listener.port) as first:
        assert await heard(first) == b"!"
        async with connected(made.listener.port) as second:
            if goodbye is None:
                assert await second.is_closed()
            else:
                header, message, _ = await second.read()
                assert (header.type, message) == (FrameType.ERROR, goodbye)
        assert (len(made.turned_away), made.listener.num_connections) == (1, 1)


@pytest.mark.virtual_time
@pytest.mark.parametrize("max_strangers", [0, 1])
async def test_close_waits_for_sessions_for_the_given_time(
    caplog: pytest.LogCaptureFixture, max_strangers: int
) -> None:
    async with (
        open_listener(session=Stubborn, max_strangers=max_strangers) as made,
        connected(made.listener.port) as raw,
    ):
        assert await heard(raw) == b"!"
        closing = asyncio.ensure_future(made.listener.close(drain_s=60))
        await asyncio.sleep(59)
        assert not closing.done()
        async with asyncio.timeout(2):
            await closing
        assert await raw.is_closed()
    assert not caplog.records


async def test_port_is_known_only_while_it_listens() -> None:
    made = Listening(1, None, Talk)
    with pytest.raises(UnavailableError, match="test listener does not listen"):
        _ = made.listener.port
    await made.listener.close()
    async with open_listener() as other:
        again = Listening(1, None, Talk)
        with pytest.raises(
            UnavailableError,
            match=f"test listener cannot listen on 127.0.0.1:{other.listener.port}",
        ):
            await again.listener.listen("127.0.0.1", other.listener.port)
        await again.listener.close()
        port = other.listener.port
        await asyncio.gather(*(other.listener.close() for _ in range(3)))
        with pytest.raises(UnavailableError, match="does not listen"):
            _ = other.listener.port
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.virtual_time
async def test_handshake_that_does_not_continue_ends() -> None:
    made = Listening(1, None, Talk)
    await made.listener.listen("127.0.0.1", 0, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), 5.0)
    async with connected(made.listener.port) as raw:
        assert await raw.is_closed()
    assert not made.turned_away
    await made.listener.close()


@pytest.mark.virtual_time
async def test_closing_without_descriptors_logs_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio accepts again a second later, as often as the backlog has places."""
    async with open_listener() as made:
        with socket.socket() as client:
            client.setblocking(False)
            with without_descriptors():
                client.connect_ex(("127.0.0.1", made.listener.port))
                await until(lambda: "cannot accept connections" in caplog.text)
                await made.listener.close()
            await asyncio.sleep(5)
    assert [one.message for one in caplog.records if one.name == "asyncio"] == []


@pytest.mark.virtual_time
async def test_drained_sessions_end_at_once() -> None:
    async with open_listener() as made, connected(made.listener.port) as raw:
        assert await heard(raw) == b"!"
        async with asyncio.timeout(1):
            await made.listener.close(drain_s=60)
        assert await raw.is_closed()


async def test_refused_connections_take_no_place_of_others() -> None:
    async with (
        open_listener(1) as made,
        connected(made.listener.port) as first,
        contextlib.AsyncExitStack() as many,
    ):
        assert await heard(first) == b"!"
        for _ in range(4):  # nothing reads the refusal
            await many.enter_async_context(connected(made.listener.port))
        await until(lambda: len(made.turned_away) >= 4)
        first.writer.close()
        await made.until_idle()
        async with connected(made.listener.port) as next_one:
            assert await heard(next_one) == b"!"


@pytest.mark.parametrize("max_strangers", [0, 3])
async def test_nothing_is_kept_of_connections_that_have_ended(max_strangers: int) -> None:
    """Neither of served ones, nor of strangers, nor of those that gave way or were turned away."""
    served: list[weakref.ref[FrameStream]] = []
    turned_away: list[weakref.ref[FrameStream]] = []

    def begin(stream: FrameStream) -> Talk:
        served.append(weakref.ref(stream))
        return Talk(stream)

    def refused(stream: FrameStream) -> None:
        turned_away.append(weakref.ref(stream))

    listener = FrameListener("test listener", 2, begin, refused, BUSY, max_strangers)
    await listener.listen("127.0.0.1", 0)
    async with contextlib.AsyncExitStack() as clients:

        async def connect() -> None:
            raw = await clients.enter_async_context(connected(listener.port))
            assert await heard(raw)

        for _ in range(3):
            await connect()
        for owner, one in zip(("greedy", "greedy", "small"), served, strict=False):
            stream = one()
            assert stream is not None
            assert listener.let_in(stream, owner)
            del stream
        for _ in range(4):
            await connect()
    assert turned_away

    def have_gone() -> bool:
        gc.collect()
        return not any(one() for one in (*served, *turned_away))

    await until(have_gone)
    assert listener.num_connections == 0
    await listener.close()
