"""Bounds on what the caller of an HTTP connection may leave waiting, and for how long, with a real
server on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import uvicorn
from lmcache_servicekit import http_protocol
from lmcache_servicekit.http_protocol import (
    HEAD_TIMEOUT_S,
    PARSED_AT_ONCE,
    READ_BYTES,
    SLOWEST_READER_BYTES_PER_S,
    WRITE_TIMEOUT_S,
    BoundedHttpProtocol,
)
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from tests.fixtures.virtual_time import CLOCK
from tests.fixtures.waiting import wait_until

App = Callable[[Scope, Receive, Send], Awaitable[None]]

SHORTEST = b"GET /v1/x HTTP/1.1\r\n\r\n"
MAX_WAITING = PARSED_AT_ONCE // len(SHORTEST) + 1
PATIENCE_S = 60.0
HOUR_S = 3600.0
"""Virtual time in which a connection that is never ended fails its test."""


class Server:
    """What a server knows of its connections.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, state: ServerState, port: int) -> None:
        self._state = state
        self.port = port

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    @property
    def protocol(self) -> BoundedHttpProtocol:
        [protocol] = self._state.connections
        assert isinstance(protocol, BoundedHttpProtocol)
        return protocol


def config_of(app: App, **options: Any) -> uvicorn.Config:
    options |= {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False}
    return uvicorn.Config(app, http=BoundedHttpProtocol, **options)


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[Server]:
    """A listener alone: the loop of uvicorn's server would look ten times a second of virtual
    time.
    """
    config, state = config_of(app), ServerState()
    config.load()
    listener = await asyncio.get_running_loop().create_server(
        lambda: BoundedHttpProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with listener:
        yield Server(state, listener.sockets[0].getsockname()[1])
    for connection in [*state.connections]:  # which a failed test leaves open
        connection.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*state.tasks)


async def _nothing() -> Message:
    return {"type": "http.request"}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the path and the body."""
    body = scope["path"].encode() + b":"
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send(start(200, len(body)))
    await send(body_part(body))


def start(status: int, num_bytes: int) -> Message:
    headers = [(b"content-length", b"%d" % num_bytes)]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body_part(body: bytes, *, has_more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": has_more}


async def deny(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without reading the body."""
    await send(start(401, 0))
    await send(body_part(b""))


@pytest.mark.virtual_time
@pytest.mark.parametrize("asks", [False, True], ids=["computes", "asks for its caller"])
async def test_waiting_requests_are_bounded(asks: bool) -> None:
    """A handler that asks whether its caller is still there makes the HTTP library read on."""
    go_on = asyncio.Event()

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        while not go_on.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await (receive() if asks else go_on.wait())
        await echo(scope, _nothing, send)

    async with serving(stuck) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(SHORTEST * 50_000)
        for _ in range(50):
            await asyncio.sleep(0.01)
            assert len(server.protocol.pipeline) <= MAX_WAITING
            assert server.protocol.num_held_bytes <= 2 * READ_BYTES
        assert server.protocol.pipeline
        assert server.protocol.num_held_bytes
        go_on.set()
        answers = 0
        while answers < 2000:
            answers += (await reader.read(1 << 16)).count(b"HTTP/1.1 200")
        writer.transport.abort()


@pytest.mark.parametrize("size", [1, 300, 1 << 20])
async def test_pipelined_requests_are_all_answered_in_order(size: int) -> None:
    """Whatever pieces they come in, with and without bodies."""
    requests, wanted = bytearray(), bytearray()
    for number in range(300):
        body = b"%d." % number * (number % 5) * (200 if number % 50 == 7 else 1)
        path = b"/n/%d" % number
        if number % 3 == 0:
            chunks = b"".join(
                b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:3], body[3:]) if part
            )
            requests += b"POST %b HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % (
                path,
                chunks,
            )
        else:
            head = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (path, len(body))
            requests += head + body
        answer = b"%b:%b" % (path, body)
        wanted += b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer)
    requests += b"GET /end HTTP/1.1\r\nconnection: close\r\n\r\n"

    async with serving(echo) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def send() -> None:
            for at in range(0, len(requests), size):
                writer.write(bytes(requests[at : at + size]))
                await writer.drain()
                if size < 100 and at % (50 * size) == 0:
                    await asyncio.sleep(0)

        async with asyncio.timeout(PATIENCE_S):
            _, answers = await asyncio.gather(send(), reader.read())
        writer.close()
    lines = b"\r\n".join(
        line for line in answers.split(b"\r\n") if not line.startswith((b"date:", b"server:"))
    )
    assert lines.startswith(bytes(wanted))


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "message",
    [
        b"POST /nope HTTP/1.1\r\ncontent-length: 100000\r\n\r\n",
        b"POST /nope HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffff\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["declared", "chunked", "empty lines between requests"],
)
async def test_bytes_after_an_answer_do_not_keep_a_connection(message: bytes) -> None:
    async with asyncio.timeout(HOUR_S), serving(deny) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(message)
        began_s = CLOCK()

        async def dribble() -> None:
            while not writer.transport.is_closing():
                writer.write(b"\r\n" if message.endswith(b"1.1\r\n\r\n") else b"x")
                await asyncio.sleep(0.5)

        dribbling = asyncio.create_task(dribble())
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        assert CLOCK() - began_s == pytest.approx(HEAD_TIMEOUT_S, abs=1)
        writer.close()
        await dribbling


@pytest.mark.virtual_time
async def test_answered_connection_ends_when_nothing_more_is_asked() -> None:
    """Also where the rest of a body has come after its answer."""
    async with serving(deny) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"PUT / HTTP/1.1\r\ncontent-length: 10\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"x" * 10)
        assert await reader.read() == b""
        writer.close()


async def test_body_that_comes_in_time_after_its_answer_leaves_the_connection_open() -> None:
    async with serving(deny) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                writer.write(b"PUT / HTTP/1.1\r\ncontent-length: 300000\r\n\r\n")
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"x" * 300_000)
                await writer.drain()
        writer.close()


@pytest.mark.virtual_time
async def test_connection_of_a_caller_that_does_not_read_ends_and_that_of_a_slow_one_does_not() -> (
    None
):
    size = 16 << 20
    num_ended = 0

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_ended
        await send(start(200, size))
        for sent in range(0, size, 1 << 20):
            await send(body_part(b"x" * (1 << 20), has_more=sent + (1 << 20) < size))
        num_ended += 1

    async with asyncio.timeout(HOUR_S), serving(large) as server:
        requests = (b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        for num_sent, request in enumerate(requests, 1):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 10)
            writer.write(request)
            # The connection is gone an iteration of the loop before its request ends.
            while num_ended < num_sent or server.num_connections:
                await asyncio.sleep(1)
            writer.transport.abort()
        assert num_ended == 2

        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        began_s, num_read = CLOCK(), 0
        while part := await reader.read(1 << 20):
            num_read += len(part)
            await asyncio.sleep(len(part) / (2 * SLOWEST_READER_BYTES_PER_S))
        assert num_read > size
        assert CLOCK() - began_s > WRITE_TIMEOUT_S
        writer.close()


def _blocking_caller(port: int) -> socket.socket:
    """A caller with little room for what it does not read."""
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.connect(("127.0.0.1", port))
    return caller


@contextmanager
def serving_on(loop: str, app: App) -> Iterator[Server]:
    """A server in a thread of its own, on a loop of this kind, with little room for what waits
    to be sent.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(config_of(app, loop=loop))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Server(server.server_state, listener.getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE_S)
        listener.close()


def _of_size(size: int) -> App:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(200, size))
        await send(body_part(b"x" * size, has_more=scope["path"] == "/fails"))
        if scope["path"] == "/fails":
            raise OSError("nothing more to read")

    return answer


@pytest.mark.realtime  # uvloop has a clock of its own
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_caller_that_reads_a_little_of_its_last_answer_is_let_go(
    monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """Reading below the mark at which writing resumes does not lift the time limit from a
    closing connection.
    """
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(http_protocol, "SLOWEST_READER_BYTES_PER_S", 1 << 30)
    with serving_on(loop, _of_size(200_000)) as server, _blocking_caller(server.port) as caller:
        caller.sendall(SHORTEST + b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        wait_until(lambda: server.num_connections == 1)
        transport = server.protocol.transport
        while not (transport.is_closing() and transport.get_write_buffer_size() <= 16 << 10):
            assert caller.recv(2048)
            time.sleep(0.002)
        assert transport.get_write_buffer_size() > 0
        wait_until(lambda: server.num_connections == 0)


@pytest.mark.parametrize(
    "end", ["a request that cannot be parsed", "a handler that fails", "a caller's end of file"]
)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_connection_closed_in_the_middle_does_not_wait_for_its_caller(
    monkeypatch: pytest.MonkeyPatch, loop: str, end: str
) -> None:
    """Too few bytes wait to pause writing, which is where the limit usually begins."""
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_protocol, "SLOWEST_READER_BYTES_PER_S", 1 << 30)
    with serving_on(loop, _of_size(60_000)) as server, _blocking_caller(server.port) as caller:
        caller.sendall(b"GET /fails HTTP/1.1\r\n\r\n" if "fails" in end else SHORTEST)
        wait_until(lambda: server.num_connections == 1)
        transport = server.protocol.transport
        wait_until(lambda: transport.get_write_buffer_size() > 0)
        if "parsed" in end:
            caller.sendall(b"\0\r\n\r\n")
        elif "file" in end:
            caller.shutdown(socket.SHUT_WR)
        wait_until(transport.is_closing)
        wait_until(lambda: server.num_connections == 0)


async def test_connections_without_a_request_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", HOUR_S)  # it would end them as well
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await go_on.wait()
        await echo(scope, receive, send)

    async with serving(slow) as server, asyncio.timeout(PATIENCE_S):
        busy = await asyncio.open_connection("127.0.0.1", server.port)
        busy[1].write(b"GET /slow HTTP/1.1\r\n\r\n")
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for number in range(6):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /%d HTTP/1.1\r\n\r\n" % number)
            assert (await reader.readuntil(b"/%d:" % number)).startswith(b"HTTP/1.1 200")
            silent.append((reader, writer))
        go_on.set()
        assert (await busy[0].readuntil(b"/slow:")).startswith(b"HTTP/1.1 200")
        assert await silent[0][0].read() == b""
        for _, writer in (busy, *silent):
            writer.close()
