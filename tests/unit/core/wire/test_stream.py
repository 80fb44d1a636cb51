"""The byte stream under lm://, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from lmcache_core.errors import UnavailableError
from lmcache_core.wire.stream import SLICE_BYTES, FrameStream

from tests.fixtures.waiting import until

LARGE = 3 * SLICE_BYTES + 17


def pattern(num_bytes: int) -> bytes:
    return (bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes]


async def wrap(sock: socket.socket) -> FrameStream:
    sock.setblocking(False)
    _, stream = await asyncio.get_running_loop().create_connection(FrameStream, sock=sock)
    return stream


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@pytest_asyncio.fixture(params=["unix", "tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[FrameStream, FrameStream]]:
    near, far = socket.socketpair() if request.param == "unix" else tcp_pair()
    streams = (await wrap(near), await wrap(far))
    yield streams
    for stream in streams:
        stream.abort()
        await stream.wait_closed()


async def read(stream: FrameStream, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    await stream.readinto(memoryview(data))
    return bytes(data)


async def test_cancelled_short_read_loses_nothing(pair: tuple[FrameStream, FrameStream]) -> None:
    near, far = pair
    await near.send(b"half")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await read(far, 8)
    await near.send(b"more")
    assert await read(far, 8) == b"halfmore"


async def test_cancelled_long_read_ends_the_connection(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    near, far = pair
    await near.send(bytes(100))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await read(far, LARGE)
    assert not far.is_open
    with pytest.raises(UnavailableError):
        await read(near, 1)


async def test_forgotten_memory_is_not_touched(pair: tuple[FrameStream, FrameStream]) -> None:
    near, far = pair
    target = bytearray(LARGE)
    reading = asyncio.create_task(far.readinto(memoryview(target)))
    data = pattern(LARGE)
    await near.send(data[:1000])
    await until(lambda: far.num_received == 1000)
    far.forget_target()
    target[:] = bytes(LARGE)
    await near.send(data[1000:], b"next")
    await reading
    assert not any(target)
    assert await read(far, 4) == b"next"


async def test_bytes_before_the_end_can_be_read(pair: tuple[FrameStream, FrameStream]) -> None:
    near, far = pair
    await near.send(b"last words")
    near.close()
    await far.wait_closed()
    assert await read(far, 10) == b"last words"
    for num_bytes in (1, LARGE):
        with pytest.raises(UnavailableError):
            await read(far, num_bytes)
    with pytest.raises(UnavailableError):
        await far.send(b"x")


async def test_end_wakes_reader_and_writer(pair: tuple[FrameStream, FrameStream]) -> None:
    near, far = pair
    reading = asyncio.create_task(read(near, 10))
    writing = asyncio.create_task(near.send(memoryview(bytes(64 << 20))))
    await asyncio.sleep(0)
    far.abort()
    for task in (reading, writing):
        with pytest.raises(UnavailableError):
            await task


async def test_send_cancelled_before_its_first_byte_leaves_the_stream_whole(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    near, far = pair
    first = asyncio.create_task(near.send(memoryview(bytes(32 << 20)), b"end"))
    await asyncio.sleep(0)
    second = asyncio.create_task(near.send(b"never"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    await far.discard(32 << 20)
    assert await read(far, 3) == b"end"
    await first
    assert near.is_open
