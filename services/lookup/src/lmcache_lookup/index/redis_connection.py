"""How the index reaches Redis: one server or one behind sentinels, every call within a deadline, every failure one of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import redis.asyncio as redis_asyncio
from lmcache_core.errors import ConfigError, UnavailableError
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from lmcache_lookup.index import redis_scripts as scripts

T = TypeVar("T")
Argument = bytes | str | int

MAX_CONNECTIONS: Final = 64
DEFAULT_SENTINEL_PORT: Final = 26379
_SENTINEL_SCHEME: Final = "redis-sentinel"

# Everything that redis-py and the sockets below it raise.
CLIENT_ERRORS: Final = (RedisError, RedisClusterException, OSError, TimeoutError)


class RedisConnection:
    """A client, the scripts, and the place where the client library's errors become ours. The constructor connects to nothing.

    Args:
        url: `redis://`, `rediss://` or `unix://`, or `redis-sentinel://[user:password@]host:port,host:port/service`.
        timeout_s: Limit on socket operations; callers of `within` set tighter ones.

    Raises:
        ConfigError: The URL cannot be read.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            self.client = _behind_sentinel(url, timeout_s) if urlsplit(url).scheme == _SENTINEL_SCHEME else _direct(url, timeout_s)
        except ValueError:
            raise ConfigError("redis_url cannot be read; write redis://[user:password@]host:port[/database]") from None
        self._scripts = {text: self.client.register_script(text) for text in scripts.ALL}

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def within(self, timeout_s: float, call: Awaitable[T]) -> T:
        """Await `call`. Only the kind of a failure is kept, since its text may hold an address.

        Raises:
            UnavailableError: Redis failed, refused, or did not answer within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except CLIENT_ERRORS as exc:
            raise UnavailableError(f"redis: {type(exc).__name__} (limit {timeout_s:g} s)") from exc

    async def run(self, script: str, keys: list[str], argv: Sequence[Argument]) -> Any:
        """Run a script by its digest; its text is sent where Redis has forgotten it."""
        return await self._scripts[script](keys, argv)


def _options(timeout_s: float) -> dict[str, Any]:
    return {
        # One immediate second try: connections of the pool that a restarted Redis has dropped fail on first use.
        "retry": Retry(NoBackoff(), 1),
        "socket_connect_timeout": timeout_s,
        "socket_timeout": timeout_s,
        "max_connections": MAX_CONNECTIONS,
    }


def _direct(url: str, timeout_s: float) -> redis_asyncio.Redis:
    """With a pool that lets callers wait for a connection, rather than failing the 65th."""
    pool = redis_asyncio.BlockingConnectionPool.from_url(url, timeout=timeout_s, **_options(timeout_s))
    return redis_asyncio.Redis.from_pool(pool)


def _behind_sentinel(url: str, timeout_s: float) -> redis_asyncio.Redis:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    sentinels = []
    for address in hosts.split(","):
        host, _, port = address.partition(":")
        if not host:
            raise ValueError("a sentinel without a host")
        sentinels.append((host, int(port or DEFAULT_SENTINEL_PORT)))
    limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    sentinel = Sentinel(sentinels, sentinel_kwargs=limits)  # type: ignore[no-untyped-call]
    client: redis_asyncio.Redis = sentinel.master_for(
        parts.path.strip("/") or "mymaster",
        username=unquote(user) or None,
        password=unquote(password) or None,
        **_options(timeout_s),
    )
    return client
