"""What is read through something in front of Redis removes nothing from Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import redis
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend

from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.wire import Arena
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

TIMEOUT_S = 60.0
LARGE_BYTES = 64 << 20
FEW_BYTES = 16 << 20


class Relay:
    """Passes requests and replies on; changes long values if told to.

    Attributes:
        change: Returns the value to hand out instead.
        error: Handed out instead of a long value.
        num_bytes: How many bytes have come from Redis.
    """

    def __init__(self, port: int) -> None:
        self.change: Callable[[bytes], bytes] | None = None
        self.error: bytes | None = None
        self.num_bytes = 0
        self.port = 0
        self._redis_port = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = asyncio.current_task()
        assert ours is not None
        self._tasks.add(ours)
        upstream, towards = await asyncio.open_connection("127.0.0.1", self._redis_port)
        back = asyncio.ensure_future(self._pass_back(upstream, writer))
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    towards.write(data)
                    await towards.drain()
        finally:
            back.cancel()
            towards.close()
            writer.close()
            self._tasks.discard(ours)

    async def _pass_back(
        self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while line := await upstream.readline():
                self.num_bytes += len(line)
                size = int(line[1:]) if line[:1] == b"$" else -1
                if size > 100 and self.change is not None:
                    value = self.change((await upstream.readexactly(size + 2))[:-2])
                    line = b"$%d\r\n%s\r\n" % (len(value), value)
                elif size > 100 and self.error is not None:
                    await upstream.readexactly(size + 2)
                    line = self.error
                elif size >= 0:
                    writer.write(line)
                    left = size + 2
                    while left:
                        part = await upstream.read(min(left, 1 << 16))
                        if not part:
                            return
                        left -= len(part)
                        self.num_bytes += len(part)
                        writer.write(part)
                        await writer.drain()
                    continue
                writer.write(line)
                await writer.drain()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[Relay]:
    relay = Relay(port)
    listener = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.port = listener.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        listener.close()
        await relay.close()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
async def relay(server: RedisServer) -> AsyncIterator[Relay]:
    async with relay_to(int(server.url.rpartition(":")[2])) as relay:
        yield relay


@pytest.fixture
async def backend(relay: Relay) -> AsyncIterator[StorageBackend]:
    backend = create_remote_backend(f"redis://127.0.0.1:{relay.port}", timeout_s=TIMEOUT_S)
    await backend.open()
    yield backend
    await backend.close()


@pytest.fixture
def plain(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


LIES: dict[str, Callable[[bytes], bytes]] = {
    "page": lambda value: b"<html>" + b"x" * 200,
    "zeros": lambda value: bytes(len(value)),
    "cut": lambda value: value[:-10],
    "longer": lambda value: value + b"more",
    "much_longer": lambda value: value + bytes(4 << 20),
    "other": lambda value: make_record("other")[: max(len(value), 101)],
    "payload": lambda value: value[:-1] + bytes([value[-1] ^ 1]),
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_stands_before_redis_removes_no_value(
    backend: StorageBackend, relay: Relay, plain: redis.Redis, lie: str
) -> None:
    keys = [make_key(name) for name in ("a", "b")]
    assert await backend.batched_put([make_chunk("a"), make_chunk("b")]) == [True, True]
    relay.change = LIES[lie]
    assert await backend.batched_get(keys, Arena()) == [Miss(MissReason.UNAVAILABLE)] * 2
    assert plain.dbsize() == 2
    relay.change = None
    results = await backend.batched_get(keys, Arena())
    assert [payload_of(result) for result in results] == [make_payload("a"), make_payload("b")]
    assert await backend.batched_contains(keys) == [True, True]


@pytest.mark.parametrize("kind", ["foreign", "cut", "other"])
async def test_a_value_that_is_no_record_is_absent_and_written_over(
    backend: StorageBackend, plain: redis.Redis, kind: str
) -> None:
    chunk = make_chunk("a")
    await backend.batched_put([chunk])
    [name] = plain.keys()
    values = {"foreign": b"x" * 1000, "cut": make_record("a")[:-1], "other": make_record("b")}
    plain.set(name, values[kind])
    [result] = await backend.batched_get([chunk.key], Arena())
    reason = MissReason.IDENTITY if kind == "other" else MissReason.CORRUPT
    assert result == Miss(reason)
    assert plain.dbsize() == 1, "only its own digest condemns a record"
    assert await backend.batched_contains([chunk.key]) == [False]
    assert await backend.batched_put([chunk]) == [True]
    assert plain.get(name) == make_record("a")
    assert await backend.batched_contains([chunk.key]) == [True]


@pytest.mark.parametrize("at", [0, 2, 4])
async def test_a_value_longer_than_its_record_is_removed_unread_and_costs_no_other_chunk(
    backend: StorageBackend, relay: Relay, plain: redis.Redis, at: int
) -> None:
    names = [f"chunk-{i}" for i in range(5)]
    keys = [make_key(name) for name in names]
    assert await backend.batched_put([make_chunk(names[at])]) == [True]
    [name] = plain.keys()
    plain.set(name, b"x")
    plain.setrange(name, LARGE_BYTES, b"x")
    await backend.batched_put([make_chunk(one) for i, one in enumerate(names) if i != at])
    arena = Arena()
    results = await backend.batched_get(keys, arena)
    assert [payload_of(result) for result in results] == [
        MissReason.CORRUPT if i == at else make_payload(one) for i, one in enumerate(names)
    ]
    assert relay.num_bytes < FEW_BYTES, "it is not read"
    assert plain.exists(name) == 0
    assert all(isinstance(result, Chunk) for i, result in enumerate(results) if i != at)


async def test_an_error_about_a_type_removes_no_value(
    backend: StorageBackend, relay: Relay, plain: redis.Redis
) -> None:
    await backend.batched_put([make_chunk("a")])
    relay.error = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
    assert await backend.batched_get([make_key("a")], Arena()) == [Miss(MissReason.CORRUPT)]
    assert plain.dbsize() == 1
