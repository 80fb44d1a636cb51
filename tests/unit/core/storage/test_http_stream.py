"""Lines from a byte stream, between bytes that are no lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from lmcache_core.errors import ProtocolError, UnavailableError
from lmcache_core.storage.remote.http_stream import MAX_LINE_BYTES, LineStream


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamWriter, LineStream]]:
    writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.put_nowait(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    _, stream = await asyncio.get_running_loop().create_connection(
        LineStream, *server.sockets[0].getsockname()
    )
    writer = await writers.get()
    yield writer, stream
    stream.abort()
    await stream.wait_closed()
    writer.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("size", [1, 2, 3, 100])
async def test_lines_come_in_any_pieces_and_bytes_between_them(size: int) -> None:
    data = b"one\r\n\r\nt\rw\no\r\n" + b"raw\r\nraw" + b"three\r\n"
    async with connected() as (writer, stream):

        async def send() -> None:
            for at in range(0, len(data), size):
                writer.write(data[at : at + size])
                await writer.drain()
                await asyncio.sleep(0.001)

        sending = asyncio.create_task(send())
        assert [await stream.read_line(10) for _ in range(3)] == [b"one", b"", b"t\rw\no"]
        raw = bytearray(8)
        await stream.readinto(memoryview(raw))
        assert raw == b"raw\r\nraw"
        assert await stream.read_line(7) == b"three"
        await sending


async def test_a_cancelled_read_loses_nothing() -> None:
    async with connected() as (writer, stream):
        writer.write(b"abc")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await stream.read_line(10)
        writer.write(b"def\r\n")
        assert await stream.read_line(10) == b"abcdef"


@pytest.mark.parametrize("max_bytes", [8, MAX_LINE_BYTES])
async def test_a_line_that_is_too_long_is_refused(max_bytes: int) -> None:
    async with connected() as (writer, stream):
        writer.write(b"x" * (max_bytes - 2) + b"\r\n" + b"y" * (max_bytes - 1) + b"\r\n")
        assert len(await stream.read_line(max_bytes)) == max_bytes - 2
        with pytest.raises(ProtocolError, match=str(max_bytes)):
            await stream.read_line(max_bytes)


async def test_an_end_within_a_line_is_told() -> None:
    async with connected() as (writer, stream):
        writer.write(b"abc")
        writer.close()
        with pytest.raises(UnavailableError):
            await stream.read_line(10)
