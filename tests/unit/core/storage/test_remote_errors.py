"""Every error of a client library leaves a remote tier as `UnavailableError`."""

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


REDIS_ERRORS = [
    *(
        kind
        for _, kind in inspect.getmembers(redis.exceptions, inspect.isclass)
        if issubclass(kind, redis.exceptions.RedisError)
    ),
    OSError,
    TimeoutError,
]


@pytest.mark.parametrize("kind", REDIS_ERRORS, ids=lambda kind: kind.__name__)
async def test_redis(kind: type[Exception]) -> None:
    error = kind.__new__(kind)  # whatever its constructor needs
    error.args = ("text",)

    class Client:
        """All its connections fail."""

        @property
        def connection_pool(self) -> Client:
            return self

        async def get_connection(self) -> None:
            raise error

        def pipeline(self, transaction: bool) -> Client:
            return self

        def execute_command(self, *command: object) -> None: ...

        async def execute(self) -> list[object]:
            raise error

        async def scan(self, *args: object, **options: object) -> None:
            raise error

    backend = RedisBackend(Client(), 1.0)  # type: ignore[arg-type]
    for call in CALLS.values():
        with pytest.raises(UnavailableError):
            await call(backend, Arena())
    with pytest.raises(UnavailableError):
        await backend.clear()


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationError("no"),
        ProtocolError("what"),
        VersionError("old"),
        UnavailableError("gone"),
    ],
)
async def test_lm(error: LMCacheError) -> None:
    class Client:
        def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, object]]:
            async def fail(*args: object, **options: object) -> object:
                raise error

            return fail

    for call in CALLS.values():
        with pytest.raises(UnavailableError):
            await call(LmBackend(Client()), Arena())  # type: ignore[arg-type]


async def test_invalid_host_name_is_an_unavailable_tier() -> None:
    for host in ("a..b", "x" * 64):
        backend = create_remote_backend(f"lm://{host}:1")
        for call in CALLS.values():
            with pytest.raises(UnavailableError):
                await call(backend, Arena())
        await backend.close()
