"""Remote tiers by the URL that configures them; every error of a client library leaves them as
`UnavailableError`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import redis.exceptions
from lmcache_core.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    UnavailableError,
    VersionError,
)
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.remote.file import FileBackend
from lmcache_core.storage.remote.lm import LmBackend
from lmcache_core.storage.remote.redis import RedisBackend
from lmcache_core.storage.remote.replicas import ReplicatedBackend

from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("lm://localhost:65432", LmBackend),
        ("lm://[::1]:7000/", LmBackend),
        ("lm://10.0.0.1", LmBackend),
        ("lm://cache-storage", ReplicatedBackend),
        ("lm://10.0.0.1,10.0.0.2:7000", ReplicatedBackend),
        ("redis://user:secret@localhost:6379/2?ttl_s=60", RedisBackend),
        ("rediss://localhost", RedisBackend),
        ("redis://localhost/15/?ttl_s=60", RedisBackend),
        ("redis-sentinel://one:26379,two/service?ttl_s=60", RedisBackend),
        ("redis-sentinel://user:p%40ss@one", RedisBackend),
        ("file:///mnt/kv", FileBackend),
    ],
)
async def test_url_makes_the_tier_of_its_scheme(url: str, kind: type) -> None:
    backend = create_remote_backend(url, token="t", timeout_s=1.5)
    assert type(backend) is kind
    assert backend.name == "storage"
    await backend.close()


def test_directory_may_have_a_name_that_is_not_utf8() -> None:
    backend = create_remote_backend("file:///mnt/kv%FF")
    assert isinstance(backend, FileBackend)
    assert os.fsencode(backend.root) == b"/mnt/kv\xff"
    with pytest.raises(ConfigError, match="no directory has such a name"):
        create_remote_backend("file:///mnt/\ud800")


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:65432", "ftp://localhost", "lm://", "lm://localhost:99999"),
        *(
            "lm://localhost?x=1",
            "lm://a,,b",
            "lm://a,b/path",
            "lm://user:secret@a,b",
            "lm://a:70000,b",
        ),
        *("redis://localhost:port", "redis://localhost?ttl_s=soon", "redis://localhost?ttl_s=-1"),
        *("redis://localhost/1/2", "rediss://user:secret@localhost/1x"),
        *("redis-sentinel://one:port/service", "redis-sentinel://,/service", "file:///mnt/k%00v"),
        *("http://user:secret@localhost", "file:///", "file://user:secret@host/directory"),
        "file:///directory?max_gb=1",
    ],
)
def test_invalid_url_is_refused_and_shows_no_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_remote_backend(url)
    assert "secret" not in str(caught.value)


def test_a_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lmcache_core.storage.remote.redis")
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    monkeypatch.setattr(importlib, "import_module", importlib.import_module)
    with pytest.raises(ConfigError, match="install"):
        create_remote_backend("redis://localhost")


CALLS: dict[str, Callable[[StorageBackend, Arena], Coroutine[Any, Any, object]]] = {
    "contains": lambda backend, arena: backend.batched_contains([make_key(1)]),
    "get": lambda backend, arena: backend.batched_get([make_key(1)], arena),
    "put": lambda backend, arena: backend.batched_put([make_chunk(1)]),
    "remove": lambda backend, arena: backend.batched_remove([make_key(1)]),
}


class FailingRedis:
    """All its connections fail."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.connection_pool = self

    async def get_connection(self) -> None:
        raise self._error

    def pipeline(self, transaction: bool) -> FailingRedis:
        return self

    def execute_command(self, *command: object) -> None: ...

    async def execute(self) -> list[object]:
        raise self._error

    async def scan(self, *args: object, **options: object) -> None:
        raise self._error


class FailingLm:
    """All its calls fail."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, object]]:
        async def fail(*args: object, **options: object) -> object:
            raise self._error

        return fail


REDIS_ERRORS = [
    redis.exceptions.ConnectionError("lost"),
    redis.exceptions.ResponseError("refused"),
    OSError("no route"),
    TimeoutError("late"),
]
LM_ERRORS = [
    AuthenticationError("no"),
    ProtocolError("what"),
    VersionError("old"),
    UnavailableError("gone"),
]
UNAVAILABLE: list[Callable[[], StorageBackend]] = [
    *(partial(RedisBackend, FailingRedis(error), 1.0) for error in REDIS_ERRORS),  # type: ignore[arg-type]
    *(partial(LmBackend, FailingLm(error)) for error in LM_ERRORS),  # type: ignore[arg-type]
    *(partial(create_remote_backend, f"lm://{host}:1") for host in ("a..b", "x" * 64)),
]


@pytest.mark.parametrize("make", UNAVAILABLE)
async def test_error_of_a_client_and_invalid_host_name_are_an_unavailable_tier(
    make: Callable[[], StorageBackend],
) -> None:
    backend = make()
    for call in CALLS.values():
        with pytest.raises(UnavailableError):
            await call(backend, Arena())
    if isinstance(backend, RedisBackend):
        with pytest.raises(UnavailableError):
            await backend.clear()
