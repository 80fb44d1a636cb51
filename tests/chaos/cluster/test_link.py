"""A link does what it is told to, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.chaos.cluster.link import Link

SAID = bytes(range(256)) * 400
PATIENCE_S = 60.0
SHORT_S = 0.1


@contextlib.asynccontextmanager
async def echo(name: bytes = b"") -> AsyncIterator[int]:
    """A server that answers its name, and then what it is told; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(name)
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def linked(*ports: int) -> AsyncIterator[Link]:
    link = Link(1)
    for i, port in enumerate(ports):
        link.set_target(f"replica-{i}", port)
    await link.open()
    try:
        yield link
    finally:
        await link.close()
        assert link.num_connections == 0


@contextlib.asynccontextmanager
async def connection(
    link: Link,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def exchange(link: Link, said: bytes = SAID) -> bytes:
    async with asyncio.timeout(PATIENCE_S), connection(link) as (reader, writer):
        writer.write(said)
        return await reader.readexactly(len(said))


async def test_bytes_pass_as_they_are() -> None:
    async with echo() as port, linked(port) as link:
        assert await exchange(link) == SAID
        assert link.num_flips == 0


async def test_replicas_take_turns_and_one_that_is_away_is_passed_by() -> None:
    async with echo(b"a") as a, echo(b"b") as b, linked(a, b) as link:
        names = []
        for _ in range(4):
            async with connection(link) as (reader, _):
                names.append(await reader.readexactly(1))
        assert sorted(names) == [b"a", b"a", b"b", b"b"]
        link.set_target("replica-0", 1)
        for _ in range(3):
            async with connection(link) as (reader, _):
                assert await reader.readexactly(1) == b"b"


async def test_without_a_replica_connections_end() -> None:
    async with linked() as link, connection(link) as (reader, _):
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(OSError):
                assert await reader.read() == b""


async def test_one_bit_is_turned_in_a_piece() -> None:
    async with echo() as port, linked(port) as link:
        link.flip_share = 1.0
        said = bytes(100)
        heard = await exchange(link, said)
        assert link.num_flips == 2
        assert sum(byte.bit_count() for byte in heard) == 2


async def test_a_cut_ends_what_is_and_not_what_comes() -> None:
    async with echo(b"a") as port, linked(port) as link:
        async with connection(link) as (reader, _):
            await reader.readexactly(1)
            await link.cut()
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(OSError):
                    assert await reader.read() == b""
        assert link.num_cut == 1
        assert await exchange(link, b"") == b""
        async with connection(link) as (reader, _):
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.readexactly(1) == b"a"


async def test_nothing_passes_while_it_is_frozen() -> None:
    async with echo() as port, linked(port) as link, connection(link) as (reader, writer):
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        await link.freeze()
        writer.write(b"y")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SHORT_S):
                await reader.readexactly(1)
        await link.thaw()
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.readexactly(1) == b"y"


async def test_a_delay_counts_in_both_directions() -> None:
    async with echo() as port, linked(port) as link:
        link.delay_s = SHORT_S
        begin_s = asyncio.get_running_loop().time()
        assert await exchange(link, b"x") == b"x"
        assert asyncio.get_running_loop().time() - begin_s >= 2 * SHORT_S
