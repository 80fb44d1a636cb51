"""Values of LMCache clients as records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
import pytest
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.record import INLINE_DIGEST_BYTES, Chunk, decode_head, payload_digest, raw_header
from lmcache_core.telemetry import Counters
from lmcache_storage import metrics
from lmcache_storage.compat.values import MAX_HEAD_BYTES, ForeignValues

from tests.fixtures.wire import MemoryStore

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
