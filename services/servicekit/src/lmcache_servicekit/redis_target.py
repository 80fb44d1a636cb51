"""What a Redis URL means: one server, one behind sentinels, or a cluster, each with or without
TLS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import redis.asyncio as redis_asyncio
from lmcache_core.errors import ConfigError
from lmcache_core.security.tls import ReloadingContext, TlsFiles, client_context
from lmcache_core.storage.remote.sentinels import SteadySentinels
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError, ReadOnlyError, ResponseError

from lmcache_servicekit.sentinel_login import SentinelLogin

Address = tuple[str, int]

DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26379
SERVER_SCHEMES: Final = ("redis", "rediss", "unix")
SENTINEL_SCHEMES: Final = ("redis-sentinel", "rediss-sentinel")
CLUSTER_SCHEMES: Final = ("redis-cluster", "rediss-cluster")
REDIS_SCHEMES: Final = (*SERVER_SCHEMES, *SENTINEL_SCHEMES, *CLUSTER_SCHEMES)
TLS_SCHEMES: Final = ("rediss", "rediss-sentinel", "rediss-cluster")

_CANNOT_BE_READ: Final = (
    "redis_url cannot be read; write redis://[user:password@]host:port[/database], and for others"
    " see its documentation"
)


class TlsConnection(SSLConnection):
    """A connection over TLS that looks at its files again when it is made anew; redis-py's own does
    so once.

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
    """In the place of redis-py's maker of contexts."""

    context: ReloadingContext

    def get(self) -> ReloadingContext:
        return self.context


@dataclass(frozen=True, slots=True)
class RedisLimits:
    """What connections may cost. Every call has a deadline of its own, which is its caller's to see
    to.

    Attributes:
        timeout_s: Limit on connecting, and on each question to a sentinel.
        max_connections: To one server; one more is refused, so that callers wait for one another
            before.
        num_retries: Of a command whose connection failed: pools hold some that a restarted server
            has dropped.
    """

    timeout_s: float
    max_connections: int
    num_retries: int

    def options(self) -> dict[str, Any]:
        """As redis-py takes them."""
        return {
            "retry": Retry(NoBackoff(), self.num_retries),
            "socket_connect_timeout": self.timeout_s,
            "socket_timeout": None,
            "max_connections": self.max_connections,
        }


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """A Redis URL, taken apart.

    Attributes:
        url: As given.
        tls: Whom to trust and what to show, where the scheme is one with TLS. Each new connection
            reads them.
        scheme: One of `REDIS_SCHEMES`.
        addresses: Sentinels, or servers of the cluster to begin with; nothing for one server.
        service: What the sentinels call it.
        login: What the sentinels are told, so that they answer.
    """

    url: str = field(repr=False)
    tls: TlsFiles
    scheme: str
    addresses: tuple[Address, ...]
    service: str
    login: SentinelLogin | None = None

    @property
    def where(self) -> str:
        """Which Redis it is, for people: hosts and ports, never credentials."""
        if self.scheme == "unix":
            return f"redis at {urlsplit(self.url).path}"
        addresses = self.addresses or (
            _address_of(urlsplit(self.url).netloc.rpartition("@")[2], DEFAULT_PORT),
        )
        hosts = ", ".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses
        )
        if self.scheme in SENTINEL_SCHEMES:
            return f"redis {self.service} of the sentinels {hosts}"
        return f"redis {'cluster ' if self.is_cluster else ''}at {hosts}"

    @property
    def is_cluster(self) -> bool:
        """Whether it is a Redis Cluster."""
        return self.scheme in CLUSTER_SCHEMES

    @classmethod
    def read(
        cls, url: str, tls: TlsFiles | None = None, login: SentinelLogin | None = None
    ) -> Self:
        """Take a URL apart: `redis://`, `rediss://`, `unix://`;
        `redis[s]-sentinel://[user:password@]host:port,host:port/service`;
        `redis[s]-cluster://[user:password@]host:port,host:port`.

        Raises:
            ConfigError: It cannot be read. The text does not repeat it: it may hold a password.
        """
        try:
            scheme, path = urlsplit(url).scheme, urlsplit(url).path.strip("/")
            if scheme not in REDIS_SCHEMES or (scheme in CLUSTER_SCHEMES and path):
                raise ValueError("neither scheme nor path can be anything")
            addresses: tuple[Address, ...] = ()
            if scheme not in SERVER_SCHEMES:
                default_port = DEFAULT_SENTINEL_PORT if scheme in SENTINEL_SCHEMES else DEFAULT_PORT
                hosts = urlsplit(url).netloc.rpartition("@")[2]
                addresses = tuple(_address_of(text, default_port) for text in hosts.split(","))
            return cls(url, tls or TlsFiles(), scheme, addresses, path or "mymaster", login)
        except ValueError:
            raise ConfigError(_CANNOT_BE_READ) from None

    def client(
        self, limits: RedisLimits
    ) -> tuple[redis_asyncio.Redis, Sequence[redis_asyncio.Redis]]:
        """The one server, or the one behind the sentinels, and the sentinels. All are to be closed.
        Connects to nothing.

        Raises:
            ConfigError: The URL or a file for TLS cannot be read.
        """
        try:
            return (
                self._behind_sentinels(limits)
                if self.scheme in SENTINEL_SCHEMES
                else (self._direct(limits), ())
            )
        except ConfigError:
            raise
        except ValueError:
            raise ConfigError(_CANNOT_BE_READ) from None

    def member(self, limits: RedisLimits) -> Callable[[Address], redis_asyncio.Redis]:
        """Makes clients of single servers of the cluster. Connects to nothing.

        Raises:
            ConfigError: A file for TLS cannot be read.
        """
        options = {**self._credentials(), **self._tls(TlsConnection), **limits.options()}
        return lambda address: _client_of(address, options)

    def cluster(self, limits: RedisLimits) -> redis_asyncio.RedisCluster:
        """The cluster as one client. Connects to nothing.

        Raises:
            ConfigError: A file for TLS cannot be read.
        """
        nodes = [ClusterNode(host, port) for host, port in self.addresses]
        cluster = redis_asyncio.RedisCluster(
            startup_nodes=nodes, **self._credentials(), **limits.options()
        )
        # It knows no connections but its own, and those that it makes for TLS never look at their
        # files again.
        tls = self._tls(TlsConnection)
        cluster.connection_kwargs.update(tls)
        for node in cluster.nodes_manager.startup_nodes.values():
            node.connection_class = tls.get("connection_class", node.connection_class)
            node.connection_kwargs.update(
                {name: value for name, value in tls.items() if name != "connection_class"}
            )
        return cluster

    def _direct(self, limits: RedisLimits) -> redis_asyncio.Redis:
        # TLS is ours to add: from the URL redis-py would make connections that never look at their
        # files again.
        plain = (
            "redis" + self.url.removeprefix(self.scheme) if self.scheme in TLS_SCHEMES else self.url
        )
        pool = redis_asyncio.ConnectionPool.from_url(
            plain, **self._tls(TlsConnection), **limits.options()
        )
        return redis_asyncio.Redis.from_pool(pool)

    def _behind_sentinels(
        self, limits: RedisLimits
    ) -> tuple[redis_asyncio.Redis, Sequence[redis_asyncio.Redis]]:
        patience = {
            **limits.options(),
            "socket_timeout": limits.timeout_s,
            "credential_provider": self.login,
        }
        sentinels = SteadySentinels([])  # type: ignore[no-untyped-call]
        sentinels.sentinels = [
            _client_of(address, {**self._tls(TlsConnection), **patience})
            for address in self.addresses
        ]
        options = {**self._credentials(), **self._tls(SentinelTlsConnection), **limits.options()}
        client: redis_asyncio.Redis = sentinels.master_for(self.service, **options)
        return client, tuple(sentinels.sentinels)

    def _credentials(self) -> dict[str, Any]:
        user, password = _credentials_of(self.url)
        return {"username": user, "password": password}

    def _tls(self, connection_class: type[TlsConnection]) -> dict[str, Any]:
        """Arguments for connections, where the scheme is one with TLS."""
        return (
            {"connection_class": connection_class, "tls": client_context(self.tls)}
            if self.scheme in TLS_SCHEMES
            else {}
        )


def describe_failure(where: str, error: BaseException, timeout_s: float) -> str:
    """A sentence about a failed call, without the error's own text, which may hold credentials.

    Args:
        where: See `RedisTarget.where`.
        error: What redis-py or the sockets below it raised.
        timeout_s: Limit on the call.
    """
    if isinstance(error, TimeoutError):  # a ResponseError's text is looked at, not shown
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


def _address_of(text: str, default_port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("an address without a host")
    return parts.hostname, parts.port or default_port


def _credentials_of(url: str) -> tuple[str | None, str | None]:
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    return unquote(user) or None, unquote(password) or None


def _client_of(address: Address, options: dict[str, Any]) -> redis_asyncio.Redis:
    host, port = address
    return redis_asyncio.Redis.from_pool(
        redis_asyncio.ConnectionPool(host=host, port=port, **options)
    )
