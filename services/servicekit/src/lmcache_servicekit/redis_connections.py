"""Connections to Redis: redis-py's, with TLS files and passwords that are read again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis.asyncio as redis_asyncio
from lmcache_core.errors import ConfigError
from lmcache_core.security.tls import ReloadingContext, TlsFiles, client_context
from lmcache_core.storage.remote.redis import SteadySentinels
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from lmcache_servicekit.redis_settings import RedisSettings
from lmcache_servicekit.redis_url import Address, RedisUrl, unreadable
from lmcache_servicekit.secret_file import read_secret_file

# Everything that redis-py and the sockets below it raise.
CLIENT_ERRORS: Final = (RedisError, RedisClusterException, OSError, TimeoutError)


class TlsConnection(SSLConnection):
    """A connection over TLS that reads its files whenever it is made; redis-py's own reads them
    once.

    Args:
        tls: What it connects with.
        options: Those of redis-py's connection.
    """

    def __init__(self, tls: ReloadingContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context = _Given(tls)  # type: ignore[assignment]


class SentinelTlsConnection(TlsConnection, SentinelManagedSSLConnection):
    """A connection over TLS to the server that sentinels name."""


@dataclass(frozen=True, slots=True)
class _Given:
    """Stands in for redis-py's maker of contexts."""

    context: ReloadingContext

    def get(self) -> ReloadingContext:
        return self.context


class SentinelLogin(CredentialProvider):
    """Reads the password of the sentinels for each new connection. While the file cannot be read,
    the last password stays in force.

    Args:
        password_file: Holds the password.
        username: Who asks; None for the default user.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """

    def __init__(self, password_file: Path, username: str | None = None) -> None:
        self._password_file = password_file
        self._username = username
        self._password = self._read()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return what `AUTH` is sent with."""
        # In the middle of a rotation the sentinels decide whether the last one still counts.
        with contextlib.suppress(ConfigError):
            self._password = self._read()
        return (self._password,) if self._username is None else (self._username, self._password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same, reading the file in a thread."""
        return await asyncio.to_thread(self.get_credentials)

    def _read(self) -> str:
        password = read_secret_file(self._password_file, "redis_sentinel_password_file")
        assert password is not None
        return password


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Where Redis is, and what it is shown.

    Attributes:
        url: Where.
        tls: Whom to trust and what to show over TLS. Each new connection reads the files.
        login: What sentinels are told; None: nothing.
    """

    url: RedisUrl
    tls: TlsFiles
    login: SentinelLogin | None = None

    @classmethod
    def of(cls, settings: RedisSettings) -> RedisAccess | None:
        """Read it from settings; None where they name no Redis.

        Raises:
            ConfigError: The URL or the file of the sentinels' password cannot be read.
        """
        if settings.redis_url is None:
            return None
        login = None
        if settings.redis_sentinel_password_file is not None:
            login = SentinelLogin(
                settings.redis_sentinel_password_file, settings.redis_sentinel_username
            )
        return cls.parse(settings.redis_url.get_secret_value(), settings.redis_tls, login)

    @classmethod
    def parse(
        cls, url: str, tls: TlsFiles | None = None, login: SentinelLogin | None = None
    ) -> RedisAccess:
        """Parse `url`.

        Raises:
            ConfigError: It cannot be read. The message does not repeat it: it may hold a password.
        """
        return cls(RedisUrl.parse(url), tls or TlsFiles(), login)

    def server(
        self, timeout_s: float, max_connections: int
    ) -> tuple[redis_asyncio.Redis, list[redis_asyncio.Redis]]:
        """Return a client of the one server, or of the one that the sentinels name, and the
        clients of the sentinels. The caller closes all of them. Connects to nothing.

        Raises:
            ConfigError: The URL or a file for TLS cannot be read.
        """
        limits = _limits(timeout_s, max_connections)
        try:
            if self.url.has_sentinels:
                return self._server_of_sentinels(limits, timeout_s)
            # redis-py would make connections from a URL with TLS that never read their files again.
            pool = redis_asyncio.ConnectionPool.from_url(
                self.url.without_tls, **self._tls(TlsConnection), **limits
            )
        except ConfigError:
            raise
        except ValueError:
            raise unreadable() from None
        return redis_asyncio.Redis.from_pool(pool), []

    def members(
        self, timeout_s: float, max_connections: int
    ) -> Callable[[Address], redis_asyncio.Redis]:
        """Return what makes clients of single servers of the cluster. Connects to nothing.

        Raises:
            ConfigError: A file for TLS cannot be read.
        """
        options = {
            **self._credentials(),
            **self._tls(TlsConnection),
            **_limits(timeout_s, max_connections),
        }
        return lambda address: _client_of(address, options)

    def _server_of_sentinels(
        self, limits: dict[str, Any], timeout_s: float
    ) -> tuple[redis_asyncio.Redis, list[redis_asyncio.Redis]]:
        asking = {**limits, "socket_timeout": timeout_s, "credential_provider": self.login}
        sentinels = SteadySentinels([])  # type: ignore[no-untyped-call]
        sentinels.sentinels = [
            _client_of(address, {**self._tls(TlsConnection), **asking})
            for address in self.url.addresses
        ]
        options = {**self._credentials(), **self._tls(SentinelTlsConnection), **limits}
        client: redis_asyncio.Redis = sentinels.master_for(self.url.service, **options)
        return client, list(sentinels.sentinels)

    def _credentials(self) -> dict[str, Any]:
        user, password = self.url.credentials
        return {"username": user, "password": password}

    def _tls(self, connection_class: type[TlsConnection]) -> dict[str, Any]:
        if not self.url.has_tls:
            return {}
        return {"connection_class": connection_class, "tls": client_context(self.tls)}


def describe_failure(where: str, error: BaseException, timeout_s: float) -> str:
    """Say what failed, without the error's own text, which may hold credentials.

    Args:
        where: Hosts and ports, as `RedisUrl.where` has them.
        error: What redis-py or the sockets below it raised.
        timeout_s: Limit on the call.
    """
    if isinstance(error, TimeoutError):
        return f"{where} does not answer within {timeout_s:g} s"
    if isinstance(error, AuthenticationError):
        return f"{where} refuses user or password"
    if not isinstance(error, ResponseError):
        return f"{where} cannot be reached ({type(error).__name__})"
    if isinstance(error, OutOfMemoryError) or "OOM" in str(error):
        return f"{where} is full: it refuses writes until maxmemory is raised or keys are removed"
    if isinstance(error, ReadOnlyError) or "READONLY" in str(error):
        return f"{where} is read-only: give the address of a master"
    return f"{where} refuses a command ({type(error).__name__})"


def _limits(timeout_s: float, max_connections: int) -> dict[str, Any]:
    """Bound connecting and the number of connections. Each call has its caller's deadline, and is
    sent again by `redis_client`.
    """
    return {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": timeout_s,
        "socket_timeout": None,
        "max_connections": max_connections,
    }


def _client_of(address: Address, options: dict[str, Any]) -> redis_asyncio.Redis:
    host, port = address
    return redis_asyncio.Redis.from_pool(
        redis_asyncio.ConnectionPool(host=host, port=port, **options)
    )
