"""The listener for LMCache clients: its answers, its bounds, its protocol as documented, and their
values as records.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.record import INLINE_DIGEST_BYTES, Chunk, decode_head, payload_digest, raw_header
from lmcache_core.telemetry import Counters
from lmcache_storage import metrics
from lmcache_storage.compat.dialect import DIALECTS, CompatCommand
from lmcache_storage.compat.server import CompatLimits
from lmcache_storage.compat.values import ABOUT_EXTENSION, MAX_HEAD_BYTES, ForeignValues

from tests.fixtures.compat import (
    GET,
    HEALTH,
    LIMITS,
    PUT,
    compat_client,
    listening,
    reply_bytes,
    request_bytes,
)
from tests.fixtures.wire import MemoryStore, connected

pytestmark = pytest.mark.virtual_time

HOUR_S = 3600.0
ROOM_S = CompatLimits(**LIMITS).room_timeout_s
VALUE = bytes(range(256)) * 4000
"""Larger than what a connection stages."""
both = pytest.mark.parametrize("dialect", DIALECTS)


@both
async def test_put_get_and_exist(dialect: str) -> None:
    async with listening(dialect) as listener, compat_client(listener.port, dialect) as client:
        assert await client.get("k") is None
        assert not await client.exists("k")
        await client.put("k", VALUE)
        await client.put("other", b"x")
        assert await client.exists("k")
        assert await client.get("k") == ((1, 3, 2, 2, 4, 2), VALUE)
        assert await client.ask(HEALTH) == reply_bytes(dialect, 200)
        await client.raw.send(request_bytes(dialect, HEALTH, b"\xff"))  # which needs no key
        assert await client.raw.reader.readexactly(DIALECTS[dialect].reply.size) == reply_bytes(
            dialect, 200
        )
        async with compat_client(listener.port, dialect) as second:
            assert await second.get("other") == ((1, 3, 2, 2, 4, 2), b"x")


@pytest.mark.parametrize("num_sent", [1, 185, 186 + 100_000])
async def test_slow_sender_is_cut_off_and_holds_no_memory(num_sent: int) -> None:
    async with listening() as listener, connected(listener.port) as raw:
        await raw.send((request_bytes("v0.3+", PUT, "k", len(VALUE)) + VALUE)[:num_sent])
        assert await raw.is_closed(HOUR_S)
        assert listener.closed("slow") == 1
        await listener.store.arena.until_empty()


async def test_client_that_does_not_read_its_value_is_cut_off() -> None:
    value = bytes(LIMITS["max_value_bytes"])
    async with listening() as listener, compat_client(listener.port) as client:
        await client.put("k", value)
        assert await client.exists("k")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", listener.port))
            deaf.sendall(request_bytes("v0.3+", GET, "k") * 4)
            await asyncio.sleep(HOUR_S)
            assert listener.closed("slow")
        assert await client.get("k") == ((1, 3, 2, 2, 4, 2), value)


async def test_silent_connection_ends_after_a_week() -> None:
    async with listening() as listener, compat_client(listener.port) as client:
        assert await client.ask(HEALTH) == reply_bytes("v0.3+", 200)
        assert await client.raw.is_closed(8 * 24 * HOUR_S)
        assert listener.closed("idle") == 1


async def test_value_without_room_is_discarded() -> None:
    async with (
        listening(store=MemoryStore(1 << 20)) as listener,
        compat_client(listener.port) as client,
    ):
        await client.put("large", bytes(2 << 20))
        await client.put("small", b"value")
        assert await client.get("large") is None
        assert await client.get("small") == ((1, 3, 2, 2, 4, 2), b"value")


async def test_memory_of_values_being_received_is_bounded() -> None:
    """The length alone takes memory: clients that announce much and send nothing must not take all
    of it.
    """
    async with listening(max_receiving_bytes=2 << 20) as listener:
        async with (
            connected(listener.port) as one,
            connected(listener.port) as two,
            connected(listener.port) as three,
        ):
            for greedy in (one, two, three):
                await greedy.send(request_bytes("v0.3+", PUT, "greedy", 1 << 20))
            await asyncio.sleep(2 * ROOM_S)
            assert listener.store.arena.allocator.used_bytes == 2 << 20
            await three.send(bytes(1 << 20), request_bytes("v0.3+", HEALTH))
            assert await three.reader.readexactly(36) == reply_bytes("v0.3+", 200)
            assert not listener.store.chunks
        await listener.store.arena.until_empty()


DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_every_dialect_and_command_is_in_the_protocol() -> None:
    text = (DOCS / "protocols.md").read_text(encoding="utf-8")
    assert f"| {ABOUT_EXTENSION} foreign value | no |" in text
    section = text.partition("## LMCache compatibility")[2].partition("\n## ")[0]
    for dialect in DIALECTS.values():
        assert re.search(
            rf"\| `{re.escape(dialect.name)}` \|.*{dialect.request.size}"
            rf" bytes.*{dialect.reply.size} bytes",
            section,
        )
    assert {int(number) for number in re.findall(r"^\| (\d) [A-Z]", section, re.MULTILINE)} == set(
        CompatCommand
    )


ABOUT = (1, 3, 2, 2, 4, 2)
LONGEST_KEY = "k" * 150


@dataclasses.dataclass
class World:
    store: MemoryStore
    counters: Counters
    values: ForeignValues

    async def put(
        self, key: str, value: bytes, about: tuple[int, int, int, int, int, int] = ABOUT
    ) -> bool:
        memory = self.values.allocate(len(value))
        assert memory is not None
        with memory:
            memory.byte_array[:] = value
            return await self.values.put(key, about, memory)

    async def get(self, key: str) -> tuple[bytes, tuple[int, ...]] | None:
        found = await self.values.get(key)
        if found is None:
            return None
        chunk, about = found
        value = bytes(chunk.memory.byte_array)
        chunk.release()
        return value, about

    def unservable(self, reason: str) -> int:
        return self.counters.value(metrics.UNSERVABLE_VALUES_TOTAL, reason)


@pytest.fixture
def world() -> Iterator[World]:
    store, counters = MemoryStore(), Counters()
    yield World(store, counters, ForeignValues(store, "acme", "v0.3+", counters))
    store.clear()
    store.arena.check_empty()


def chunk_key(key: str) -> ChunkKey:
    return ChunkKey.of("acme", CacheEngineKey("lmcache-v0.3+", "", 1, 0, key))


async def test_record_is_marked_as_foreign_and_lossy(world: World) -> None:
    await world.put(LONGEST_KEY, b"value", (-(2**31), 2**31 - 1, 1, 2, 3, 4))
    chunk = world.store.chunks[chunk_key(LONGEST_KEY)]
    header, payload_bytes = decode_head(chunk.head, chunk_key(LONGEST_KEY).key)
    assert (header.serde, header.lossy, header.digest, payload_bytes) == (
        "lmcache-v0.3+",
        True,
        payload_digest(b"value"),
        5,
    )
    assert len(chunk.head) <= MAX_HEAD_BYTES


@pytest.mark.parametrize("size", [64, INLINE_DIGEST_BYTES + 1])
async def test_a_damaged_value_is_missing_and_removed(world: World, size: int) -> None:
    await world.put("k", bytes(size))
    world.store.chunks[chunk_key("k")].memory.byte_array[size // 2] ^= 1
    assert await world.get("k") is None
    assert world.unservable("corrupt") == 1
    assert not world.store.chunks
    assert await world.put("k", bytes(size))
    assert await world.get("k") == (bytes(size), ABOUT)


async def test_dialects_and_tenants_see_nothing_of_one_another(world: World) -> None:
    await world.put("k", b"value")
    for tenant, dialect in (("acme", "v0.2"), ("rival", "v0.3+")):
        other = ForeignValues(world.store, tenant, dialect, world.counters)
        assert not await other.contains("k")
        assert await other.get("k") is None


@pytest.mark.parametrize("serde", ["naive", "lmcache-v0.3+"])
async def test_record_that_is_no_foreign_value_is_not_served(world: World, serde: str) -> None:
    """KV of our own engines under this name, or a record of the right serde that does not say
    what its value is.
    """
    key = chunk_key("k")
    header = msgspec.structs.replace(
        raw_header(key.key, (3,), "uint8", payload_digest(b"abc")), serde=serde
    )
    await world.store.put(Chunk(key, header, None, BytesBufferMemoryObj(b"abc"), "test"))
    assert await world.get("k") is None
    assert world.unservable("encoding") == 1
    assert await world.put("k", b"mine")
    assert await world.get("k") == (b"mine", ABOUT)
