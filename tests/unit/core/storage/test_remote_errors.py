"""No exception of a client library leaves a remote tier."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import redis.exceptions
from lmcache_core.errors import (
    AuthenticationError,
    LMCacheError,
    ProtocolError,
    UnavailableError,
    VersionError,
)
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.remote.lm import LmBackend
from lmcache_core.storage.remote.redis import RedisBackend

from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key

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


REDIS_ERRORS = [
    *exceptions_of(redis.exceptions, redis.exceptions.RedisError),
    OSError,
    ConnectionResetError,
    TimeoutError,
]


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
