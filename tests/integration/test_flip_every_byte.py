"""Every byte of a stored record, flipped in turn, on every way into the process but disk: never
a chunk, always a miss.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
import redis
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend

from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.wire import Arena, MemoryStore, serving
from tests.suites.chunks import make_key, make_payload, make_record

KEY = make_key("flipped")
SMALL = make_record("flipped", make_payload("flipped", 3000))
LARGE_PAYLOAD_BYTES = 32 << 20
NUM_LARGE_FLIPS = 12
REFUSED = {MissReason.CORRUPT, MissReason.IDENTITY}


class Way(ABC):
    """One way by which a record enters the process.

    Attributes:
        backend: The tier under test, open.
    """

    backend: StorageBackend

    @abstractmethod
    def serve(self, record: bytes) -> None:
        """Have these bytes lie where the tier reads."""


class LmWay(Way):
    def __init__(self, store: MemoryStore, port: int) -> None:
        self._store = store
        self.backend = create_remote_backend(f"lm://127.0.0.1:{port}", timeout_s=20)

    def serve(self, record: bytes) -> None:
        self._store.tampered[KEY] = record


class RedisWay(Way):
    def __init__(self, server: RedisServer, plain: redis.Redis) -> None:
        self._plain = plain
        self.backend = create_remote_backend(server.url, timeout_s=20)

    def serve(self, record: bytes) -> None:
        self._plain.set(f"lmc:{KEY.tenant}:{KEY.key.to_url()}", record)


@asynccontextmanager
async def lm_way() -> AsyncIterator[Way]:
    store = MemoryStore()
    async with serving(store) as server:
        yield LmWay(store, server.port)


@asynccontextmanager
async def redis_way() -> AsyncIterator[Way]:
    with running_redis() as server, server.client() as plain:
        yield RedisWay(server, plain)


@pytest_asyncio.fixture(params=[lm_way, redis_way], ids=["lm", "redis"])
async def way(request: pytest.FixtureRequest) -> AsyncIterator[Way]:
    async with request.param() as way:
        await way.backend.open()
        yield way
        await way.backend.close()


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 0xFF]) + record[at + 1 :]


async def verdict(way: Way, record: bytes, arena: Arena) -> MissReason | bytes:
    """What a get makes of these bytes: a payload, or why there is none."""
    way.serve(record)
    [result] = await way.backend.batched_get([KEY], arena)
    if isinstance(result, Miss):
        return result.reason
    assert isinstance(result, Chunk)
    payload = bytes(result.memory.byte_array)
    result.release()
    return payload


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(LARGE_PAYLOAD_BYTES + (1 << 20))
    yield arena
    arena.check_empty()


async def test_every_single_byte(way: Way, arena: Arena) -> None:
    assert len(SMALL) <= 8192
    assert await verdict(way, SMALL, arena) == make_payload("flipped", 3000)
    served = [
        at
        for at in range(len(SMALL))
        if await verdict(way, flipped(SMALL, at), arena) not in REFUSED
    ]
    assert served == []
    assert await verdict(way, SMALL, arena) == make_payload("flipped", 3000)


async def test_random_bytes_of_a_large_record(way: Way, arena: Arena) -> None:
    rng = random.Random(20261121)
    payload = rng.randbytes(1 << 20) * (LARGE_PAYLOAD_BYTES >> 20)
    record = make_record("flipped", payload)
    assert await verdict(way, record, arena) == payload
    ends = [0, len(record) - 1, len(record) - LARGE_PAYLOAD_BYTES]
    for at in [*ends, *(rng.randrange(len(record)) for _ in range(NUM_LARGE_FLIPS))]:
        assert await verdict(way, flipped(record, at), arena) in REFUSED


async def test_every_truncation_of_the_head(way: Way, arena: Arena) -> None:
    for length in [*range(1, 520, 7), len(SMALL) - 1]:
        assert await verdict(way, SMALL[:length], arena) in REFUSED
