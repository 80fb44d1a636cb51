"""Bytes of a conversation flipped on their way: the checksums of headers and records suffice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from lmcache_core.errors import LMCacheError
from lmcache_core.record import Chunk
from lmcache_core.wire.client import ClientOptions, LmClient

from tests.fixtures.wire import Arena, MemoryStore, serving
from tests.suites.chunks import make_chunk, make_key, make_payload

pytestmark = pytest.mark.virtual_time

NAMES = ("a", "b")
NUM_PAYLOAD_BYTES = 64
STRIDE = 5
"""One byte in so many is flipped: of every frame some of header, message and record."""


@dataclass
class Flipper:
    """Passes on one connection, with one byte of one direction changed.

    Attributes:
        at: Which byte; None: none.
        upwards: Whether it is one to the server.
        num_passed: Bytes passed on, to the server and from it.
    """

    port: int
    at: int | None
    upwards: bool
    num_passed: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(self._pass(reader, back, True), self._pass(there, writer, False))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upwards: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := bytearray(await reader.read(1 << 16)):
                place = (
                    -1
                    if self.at is None or upwards is not self.upwards
                    else self.at - self.num_passed[upwards]
                )
                if 0 <= place < len(data):
                    data[place] ^= 1 << (place % 8)
                self.num_passed[upwards] += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def flipping(flipper: Flipper) -> AsyncIterator[LmClient]:
    proxy = await asyncio.start_server(flipper.serve, "127.0.0.1", 0)
    options = ClientOptions(timeout_s=0.5, backoff_initial_s=10.0, backoff_cap_s=10.0)
    client = LmClient("127.0.0.1", proxy.sockets[0].getsockname()[1], None, options)
    try:
        yield client
    finally:
        await client.close()
        proxy.close()
        await proxy.wait_closed()


async def converse(client: LmClient, arena: Arena) -> None:
    """Put, look up and get the chunks; a chunk that comes must be right."""
    with contextlib.suppress(LMCacheError):
        await client.put(
            [make_chunk(name, payload=make_payload(name, NUM_PAYLOAD_BYTES)) for name in NAMES]
        )
    with contextlib.suppress(LMCacheError):
        await client.contains([make_key(name) for name in NAMES])
    with contextlib.suppress(LMCacheError):
        for name, result in zip(
            NAMES, await client.get([make_key(name) for name in NAMES], arena), strict=True
        ):
            if isinstance(result, Chunk):
                assert result.key == make_key(name)
                assert bytes(result.memory.byte_array) == make_payload(name, NUM_PAYLOAD_BYTES)
                result.release()


@pytest.mark.parametrize("upwards", [True, False])
async def test_no_flipped_byte_gives_a_wrong_chunk(upwards: bool) -> None:
    store, arena = MemoryStore(), Arena()
    async with serving(store) as server:
        whole = Flipper(server.port, None, upwards)
        async with flipping(whole) as client:
            await converse(client, arena)
        assert {key: bytes(chunk.memory.byte_array) for key, chunk in store.chunks.items()} == {
            make_key(name): make_payload(name, NUM_PAYLOAD_BYTES) for name in NAMES
        }
        for at in range(0, whole.num_passed[upwards], STRIDE):
            store.clear()
            async with flipping(Flipper(server.port, at, upwards)) as client:
                await converse(client, arena)
            for key, chunk in store.chunks.items():
                assert key in {make_key(name) for name in NAMES}, at
                name = next(name for name in NAMES if make_key(name) == key)
                assert bytes(chunk.memory.byte_array) == make_payload(name, NUM_PAYLOAD_BYTES), at
    await arena.until_empty()
