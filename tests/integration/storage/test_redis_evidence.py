"""Values that a proxy in front of Redis changes are not removed from Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import redis
from lmcache_core.record import Miss, MissReason
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
    """Passes requests and replies on, long values as `change` returns them."""

    def __init__(self, port: int) -> None:
        self.change: Callable[[bytes], bytes] | None = None
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
                size = int(line[1:]) if line[:1] == b"$" else -1
                if size >= 0:
                    value = (await upstream.readexactly(size + 2))[:-2]
                    if size > 100 and self.change is not None:
                        value = self.change(value)
                    line = b"$%d\r\n%s\r\n" % (len(value), value)
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
    "cut": lambda value: value[:-10],
    "much_longer": lambda value: value + bytes(4 << 20),
    "other": lambda value: make_record("other")[: max(len(value), 101)],
    "payload": lambda value: value[:-1] + bytes([value[-1] ^ 1]),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_proxy_removes_no_value(
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
async def test_a_value_that_is_no_record_is_missing_and_replaced(
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


async def test_a_value_longer_than_its_record_is_removed_unread(
    server: RedisServer, plain: redis.Redis
) -> None:
    backend, at = create_remote_backend(server.url, timeout_s=TIMEOUT_S), 2
    names = [f"chunk-{i}" for i in range(5)]
    keys = [make_key(name) for name in names]
    assert await backend.batched_put([make_chunk(names[at])]) == [True]
    [name] = plain.keys()
    plain.set(name, b"x")
    plain.setrange(name, LARGE_BYTES, b"x")
    await backend.batched_put([make_chunk(one) for i, one in enumerate(names) if i != at])
    num_sent = plain.info("stats")["total_net_output_bytes"]
    results = await backend.batched_get(keys, Arena())
    assert [payload_of(result) for result in results] == [
        MissReason.CORRUPT if i == at else make_payload(one) for i, one in enumerate(names)
    ]
    assert plain.info("stats")["total_net_output_bytes"] - num_sent < FEW_BYTES
    assert plain.exists(name) == 0
    await backend.close()
