"""No exception of a client library leaves a remote tier."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
import redis.exceptions
from lmcache_core.errors import (
    AuthenticationError,
    LMCacheError,
    ProtocolError,
    UnavailableError,
    VersionError,
)
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import RemoteOptions, create_remote_backend
from lmcache_core.storage.remote.http import MAX_CONNECTIONS, HttpBackend
from lmcache_core.storage.remote.lm import LmBackend
from lmcache_core.storage.remote.redis import RedisBackend

from tests.fixtures.rest import RestServer, rest_server
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key, make_record

CALLS: dict[str, Callable[[StorageBackend, Arena], Coroutine[Any, Any, object]]] = {
    "contains": lambda backend, arena: backend.batched_contains([make_key(1)]),
    "get": lambda backend, arena: backend.batched_get([make_key(1)], arena),
    "put": lambda backend, arena: backend.batched_put([make_chunk(1)]),
    "remove": lambda backend, arena: backend.batched_remove([make_key(1)]),
}


def exceptions_of(module: Any, root: type[Exception]) -> list[type[Exception]]:
    return [
        kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, root)
    ]


def instance(kind: type[Exception]) -> Exception:
    """One of that kind, whatever its constructor wants."""
    error = kind.__new__(kind)
    error.args = ("text",)
    return error


def each(kinds: list[type[Exception]]) -> pytest.MarkDecorator:
    """Every kind of error in one call, and one kind in every call."""
    cases = [(kind, "get") for kind in kinds] + [
        (kinds[-1], call) for call in CALLS if call != "get"
    ]
    return pytest.mark.parametrize(
        ("kind", "call"), cases, ids=[f"{kind.__name__}-{call}" for kind, call in cases]
    )


HTTP_ERRORS = [
    *exceptions_of(httpx, httpx.HTTPError),
    *exceptions_of(httpx, httpx.StreamError),
    httpx.InvalidURL,
]
REDIS_ERRORS = [
    *exceptions_of(redis.exceptions, redis.exceptions.RedisError),
    OSError,
    ConnectionResetError,
    TimeoutError,
]


@each(HTTP_ERRORS)
async def test_httpx(kind: type[Exception], call: str) -> None:
    class Failing(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise instance(kind)

    backend = HttpBackend("http://localhost", RemoteOptions(), Failing())
    await backend.open()
    with pytest.raises(UnavailableError):
        await CALLS[call](backend, Arena())
    await backend.close()


@each(REDIS_ERRORS)
async def test_redis(kind: type[Exception], call: str) -> None:
    class Pipeline:
        def execute_command(self, *command: object) -> None: ...

        async def execute(self) -> list[object]:
            raise instance(kind)

    class Client:
        """Whose connections all fail."""

        @property
        def connection_pool(self) -> Client:
            return self

        async def get_connection(self) -> None:
            raise instance(kind)

        def pipeline(self, transaction: bool) -> Pipeline:
            return Pipeline()

        async def scan(self, *args: object, **options: object) -> None:
            raise instance(kind)

    backend = RedisBackend(Client(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError):
        await CALLS[call](backend, Arena())
    with pytest.raises(UnavailableError):
        await backend.clear()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error",
    [
        AuthenticationError("no"),
        ProtocolError("what"),
        VersionError("old"),
        UnavailableError("gone"),
    ],
)
async def test_lm(error: LMCacheError, call: str) -> None:
    class Client:
        def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, object]]:
            async def fail(*args: object, **options: object) -> object:
                raise error

            return fail

    with pytest.raises(UnavailableError):
        await CALLS[call](LmBackend(Client()), Arena())  # type: ignore[arg-type]


async def test_a_host_that_is_no_name_cannot_be_reached() -> None:
    for host in ("a..b", "x" * 64):
        backend = create_remote_backend(f"lm://{host}:1")
        for call in CALLS.values():
            with pytest.raises(UnavailableError):
                await call(backend, Arena())
        await backend.close()


@pytest.fixture
async def rest() -> AsyncIterator[RestServer]:
    async with rest_server() as server:
        yield server


@pytest.mark.parametrize("status", [302, 400, 401, 403, 500, 502])
async def test_a_status_that_is_no_success(rest: RestServer, status: int) -> None:
    rest.status = status
    backend = HttpBackend(rest.url, RemoteOptions())
    await backend.open()
    for call in CALLS.values():
        with pytest.raises(UnavailableError):
            await call(backend, Arena())
    await backend.close()


@pytest.mark.parametrize("status", [408, 409, 413, 422, 429, 503, 507])
async def test_a_record_that_the_server_does_not_take(rest: RestServer, status: int) -> None:
    rest.status = status
    backend = HttpBackend(rest.url, RemoteOptions())
    await backend.open()
    assert await backend.batched_put([make_chunk(1), make_chunk(2)]) == [False, False]
    await backend.close()


ANSWERS = {
    "garbage": b"\x00\x01\x02\r\n\r\n",
    "no body": b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n",
    "not json": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
    "other json": b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"present": [1]}',
    "too few": b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"present": []}',
    "too long": b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b" " * 9_000_000,
    "bad chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "endless header": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
    "one long header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000,
    "no header": b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
    "chunk too long": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
    "no last chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
    "interim only": b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
    "another protocol": b"SSH-2.0-OpenSSH\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_answers_that_are_none(rest: RestServer, answer: bytes) -> None:
    rest.raw_answer = answer
    backend = HttpBackend(rest.url, RemoteOptions())
    await backend.open()
    with pytest.raises(UnavailableError):
        await backend.batched_contains([make_key(1)])
    await backend.close()


async def test_a_connection_is_used_again_when_its_answer_was_read_to_the_end(
    rest: RestServer,
) -> None:
    backend = HttpBackend(rest.url, RemoteOptions())
    await backend.open()
    for call in CALLS.values():
        await call(backend, Arena())
    assert rest.num_connections == 1
    name = make_key(1).key.to_url()
    for damaged in (b"x" * 600, make_record(1)[:-1]):
        rest.records[name] = damaged
        for _ in range(2 * MAX_CONNECTIONS):
            assert await backend.batched_get([make_key(1)], Arena()) == [Miss(MissReason.CORRUPT)]
    rest.records[name] = make_record(1)
    [result] = await backend.batched_get([make_key(1)], Arena())
    assert isinstance(result, Chunk), "answers that were left gave their connections' places back"
    result.release()
    await backend.close()


async def test_calls_beyond_the_bound_wait_and_a_cancelled_one_frees_its_place(
    rest: RestServer,
) -> None:
    waiting = asyncio.Event()
    serve_one = rest._serve_one

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await waiting.wait()
        return await serve_one(reader, writer)

    rest._serve_one = never  # type: ignore[method-assign]
    backend = HttpBackend(rest.url, RemoteOptions())
    await backend.open()
    calls = [
        asyncio.ensure_future(backend.batched_contains([make_key(1)]))
        for _ in range(MAX_CONNECTIONS + 1)
    ]
    async with asyncio.timeout(60):
        while rest.num_connections < MAX_CONNECTIONS:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert rest.num_connections == MAX_CONNECTIONS
        calls[0].cancel()
        while rest.num_connections == MAX_CONNECTIONS:
            await asyncio.sleep(0.005)
    waiting.set()
    assert await asyncio.gather(*calls[1:]) == [[False]] * MAX_CONNECTIONS
    await backend.close()


async def test_a_server_that_does_not_answer_is_given_up(rest: RestServer) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await reader.read()
        return False

    rest._serve_one = never  # type: ignore[method-assign]
    backend = HttpBackend(rest.url, RemoteOptions(timeout_s=0.1))
    await backend.open()
    for call in CALLS.values():
        with pytest.raises(UnavailableError):
            await call(backend, Arena())
    await backend.close()
    with pytest.raises(UnavailableError):
        await backend.batched_contains([make_key(1)])


async def test_what_came_in_time_is_kept_also_when_the_tiers_own_deadline_is_the_callers() -> None:
    class Stalling(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield make_record(1)
            await asyncio.sleep(10)

    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Stalling()))
    backend = HttpBackend("http://localhost", RemoteOptions(timeout_s=0.5), transport)
    await backend.open()
    results = await backend.batched_get([make_key(1), make_key(2)], Arena(), timeout_s=0.5)
    assert isinstance(results[0], Chunk)
    assert results[1] == Miss(MissReason.DEADLINE)
    results[0].release()
    await backend.close()
