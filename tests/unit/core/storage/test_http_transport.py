"""The HTTP client's own connections: what answers are taken, which are refused, and when a
connection is used again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from lmcache_core.storage.remote import http_transport
from lmcache_core.storage.remote.http_transport import StreamTransport


class Scripted:
    """Answers every request with the same bytes."""

    def __init__(self, answer: bytes, hangs_up: bool) -> None:
        self.answer = answer
        self.hangs_up = hangs_up
        self.num_connections = 0
        self.requests: list[bytes] = []
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head)
                length = [
                    int(line[16:])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length: ")
                ]
                self.bodies.append(await reader.readexactly(length[0] if length else 0))
                writer.write(self.answer)
                await writer.drain()
                if self.hangs_up:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def answering(
    answer: bytes, hangs_up: bool = False, max_connections: int = 2
) -> AsyncIterator[tuple[httpx.AsyncClient, Scripted]]:
    scripted = Scripted(answer, hangs_up)
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = StreamTransport(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), max_connections)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", transport=transport
    ) as client:
        yield client, scripted
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0)


async def body(response: httpx.Response) -> bytes:
    """Every piece, copied before the next one is asked for."""
    return b"".join([bytes(piece) async for piece in response.aiter_raw()])


LARGE = bytes(range(256)) * 12_289  # three pieces and a bit


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200\r\ncontent-length:0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x"),
        (
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding:"
                b" chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n"
            ),
            b"abc",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: x\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(LARGE) + LARGE, LARGE),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(LARGE)
            + LARGE
            + b"\r\n0\r\n\r\n",
            LARGE,
        ),
    ],
)
async def test_answers_are_read_whole_and_their_connection_is_used_again(
    answer: bytes, expected: bytes
) -> None:
    async with answering(answer) as (client, scripted):
        for _ in range(3):
            async with client.stream("GET", "/a%20b?c=d") as response:
                assert await body(response) == expected
        assert scripted.num_connections == 1
        assert scripted.requests[0].startswith(b"GET /a%20b?c=d HTTP/1.1\r\n")
        assert b"\r\nHost: 127.0.0.1:" in scripted.requests[0]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * http_transport.MAX_HEAD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: xxxxxxxxxx\r\n" * 6000 + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
)
async def test_what_is_no_whole_answer_is_an_error_and_ends_the_connection(answer: bytes) -> None:
    async with answering(answer, hangs_up=True) as (client, scripted):
        for _ in range(2):
            with pytest.raises(httpx.TransportError):
                async with client.stream("GET", "/") as response:
                    await body(response)
        assert scripted.num_connections == 2


async def test_bodies_are_sent_piece_by_piece() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(LARGE), 100_000):
            yield LARGE[at : at + 100_000]

    async with answering(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n") as (
        client,
        scripted,
    ):
        answer = await client.put(
            "/x", content=pieces(), headers={"Content-Length": str(len(LARGE))}
        )
        assert answer.status_code == 201
        assert scripted.bodies == [LARGE]
        assert (await client.post("/x", json={"a": 1})).status_code == 201
        assert scripted.bodies[1] == b'{"a":1}'
        assert (await client.head("/x")).status_code == 201


async def test_an_answer_that_is_left_ends_its_connection_and_frees_its_place() -> None:
    async with answering(
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", max_connections=1
    ) as (client, scripted):
        for _ in range(3):
            async with client.stream("GET", "/") as response:
                assert response.status_code == 200
        assert scripted.num_connections == 3


async def test_a_connection_that_the_server_closes_or_that_has_rested_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    async with answering(
        ok.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), hangs_up=True
    ) as (client, scripted):
        for _ in range(2):
            assert (await client.get("/")).status_code == 200
        assert scripted.num_connections == 2
    monkeypatch.setattr(http_transport, "MAX_REST_S", 0.0)
    async with answering(ok) as (client, scripted):
        for _ in range(2):
            assert (await client.get("/")).status_code == 200
        assert scripted.num_connections == 2


async def test_requests_beyond_the_bound_wait_and_a_cancelled_one_frees_its_place() -> None:
    async with answering(b"", max_connections=1) as (client, scripted):
        first = asyncio.create_task(client.get("/"))
        second = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.05)
        assert scripted.num_connections == 1
        first.cancel()
        async with asyncio.timeout(5):
            while scripted.num_connections < 2:
                await asyncio.sleep(0.005)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def test_nobody_there_is_a_connection_error() -> None:
    transport = StreamTransport(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), 1)
    async with httpx.AsyncClient(transport=transport) as client:
        for _ in range(2):
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:1/")
