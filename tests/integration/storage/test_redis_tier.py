"""The Redis tier: a full server, one found through a sentinel, large and foreign values, and what a
proxy in front of Redis changes, which is not removed from Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import uvloop
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.remote.redis import BATCH_KEYS

from tests.fixtures.redis_server import RedisServer, redis_executable, running_redis
from tests.fixtures.redis_tls import behind_tls
from tests.fixtures.tls import Authority, server_tls
from tests.fixtures.waiting import wait_until
from tests.fixtures.wire import Arena
from tests.suites.backend_suite import payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload, make_record

TIMEOUT_S = 2.0
"""For calls that are to fail."""
PATIENT_S = 60.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


async def works(backend: StorageBackend) -> None:
    arena = Arena()
    assert await backend.batched_put([make_chunk(1)]) == [True]
    [result] = await backend.batched_get([make_key(1)], arena)
    assert isinstance(result, Chunk)
    result.release()
    arena.check_empty()


async def test_a_full_server_refuses_chunks() -> None:
    with running_redis("--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as server:
        backend = create_remote_backend(server.url, timeout_s=PATIENT_S)
        stored = await backend.batched_put(
            [make_chunk(i, payload=make_payload(i, 500_000)) for i in range(8)]
        )
        assert not all(stored)
        assert await backend.batched_contains([make_key(i) for i in range(8)]) == stored
        await backend.close()


async def test_a_value_of_another_type_is_a_miss_and_deleted(server: RedisServer) -> None:
    backend = create_remote_backend(server.url, timeout_s=PATIENT_S)
    arena = Arena()
    await backend.batched_put([make_chunk(i) for i in range(8)])
    with server.client() as plain:
        [name] = [name for name in plain.scan_iter() if make_key(3).key.to_url() in name.decode()]
        plain.delete(name)
        plain.rpush(name, b"a list")
        found = await backend.batched_get([make_key(i) for i in range(8)], arena)
        assert [isinstance(result, Chunk) for result in found] == [i != 3 for i in range(8)]
        assert found[3] == Miss(MissReason.CORRUPT)
        for result in found:
            if isinstance(result, Chunk):
                result.release()
        assert not plain.exists(name)
    assert await backend.batched_contains([make_key(3)]) == [False]
    arena.check_empty()
    await backend.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
def test_large_chunks_on_each_kind_of_loop_and_connection(
    server: RedisServer,
    tmp_path: Path,
    loop: Callable[[], asyncio.AbstractEventLoop],
    is_encrypted: bool,
) -> None:
    chunks = [make_chunk(i, payload=make_payload(i, 3_000_000 + i)) for i in range(4)]

    async def both_ways(url: str) -> None:
        backend, arena = create_remote_backend(url, timeout_s=PATIENT_S), Arena(16 << 20)
        for _ in range(2):
            assert await backend.batched_put(chunks) == [True] * 4
            results = await backend.batched_get([chunk.key for chunk in chunks], arena)
            for chunk, result in zip(chunks, results, strict=True):
                assert isinstance(result, Chunk)
                assert result.memory.byte_array == chunk.memory.byte_array
                result.release()
            assert await backend.batched_contains([chunks[0].key]) == [True]
        arena.check_empty()
        await backend.close()

    async def encrypted() -> None:
        authority = Authority(tmp_path)
        async with behind_tls(server.port, server_tls(authority.sign("redis"))) as port:
            trusted = f"ssl_ca_certs={authority.file}"
            await both_ways(f"rediss://127.0.0.1:{port}?{trusted}")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(encrypted() if is_encrypted else both_ways(server.url))


async def test_an_expiry_is_set_when_asked_for(server: RedisServer) -> None:
    for url, low, high in ((f"{server.url}?ttl_s=100", 90, 100), (server.url, -1, -1)):
        backend = create_remote_backend(url, timeout_s=PATIENT_S)
        await backend.clear()
        await backend.batched_put([make_chunk(1)])
        with server.client() as plain:
            [name] = plain.keys("lmc:default:*")
            assert low <= plain.ttl(name) <= high
        await backend.close()


def answers(plain: redis.Redis) -> bool:
    try:
        return bool(plain.ping())
    except redis.ConnectionError:
        return False


@contextmanager
def running_sentinel(watched: RedisServer, directory: Path) -> Iterator[int]:
    """A sentinel that knows `watched` as "kv"; yields its port."""
    port = RedisServer().port
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\nsentinel monitor kv 127.0.0.1"
        f" {watched.port} 1\n"
    )
    command = [redis_executable(), str(config), "--sentinel"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with redis.Redis(port=port, socket_timeout=5) as plain:
            wait_until(lambda: answers(plain))
        yield port
    finally:
        process.kill()
        process.wait()


async def test_redis_is_found_through_the_second_sentinel(
    server: RedisServer, tmp_path: Path
) -> None:
    with running_sentinel(server, tmp_path) as port:
        away = RedisServer().port
        backend = create_remote_backend(
            f"redis-sentinel://127.0.0.1:{away},127.0.0.1:{port}/kv", timeout_s=5
        )
        await works(backend)
        with server.client() as plain:
            assert plain.dbsize() == 1
        await backend.close()
    backend = create_remote_backend(f"redis-sentinel://127.0.0.1:{port}/kv", timeout_s=TIMEOUT_S)
    with pytest.raises(UnavailableError):
        await backend.batched_contains([make_key(1)])
    await backend.close()


async def test_each_step_of_a_clear_has_the_deadline(
    monkeypatch: pytest.MonkeyPatch, server: RedisServer
) -> None:
    """The deadline is that of a step; the loop's clock moves by most of it at each step."""
    backend = create_remote_backend(server.url, timeout_s=PATIENT_S)
    loop = asyncio.get_running_loop()
    time_of_loop, passed_s = loop.time, [0.0]
    monkeypatch.setattr(loop, "time", lambda: time_of_loop() + passed_s[0])
    with server.client() as plain:
        plain.mset({f"lmc:default:{i}": b"x" for i in range(20 * BATCH_KEYS)} | {"other": b"x"})
    scan = redis.asyncio.Redis.scan

    async def slow_scan(*arguments: Any, **options: Any) -> Any:
        passed_s[0] += 0.4 * PATIENT_S
        return await scan(*arguments, **options)

    monkeypatch.setattr(redis.asyncio.Redis, "scan", slow_scan)
    assert await backend.clear() == 20 * BATCH_KEYS
    with server.client() as plain:
        assert plain.keys() == [b"other"]
    await backend.close()


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
async def relay(server: RedisServer) -> AsyncIterator[Relay]:
    async with relay_to(int(server.url.rpartition(":")[2])) as relay:
        yield relay


@pytest.fixture
async def backend(relay: Relay) -> AsyncIterator[StorageBackend]:
    backend = create_remote_backend(f"redis://127.0.0.1:{relay.port}", timeout_s=PATIENT_S)
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
    backend, at = create_remote_backend(server.url, timeout_s=PATIENT_S), 2
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
