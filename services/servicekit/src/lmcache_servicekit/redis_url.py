"""The one grammar of Redis URLs in services."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from lmcache_core.errors import ConfigError

Address = tuple[str, int]

DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26379
SERVER_SCHEMES: Final = ("redis", "rediss", "unix")
SENTINEL_SCHEMES: Final = ("redis-sentinel", "rediss-sentinel")
CLUSTER_SCHEMES: Final = ("redis-cluster", "rediss-cluster")
REDIS_SCHEMES: Final = (*SERVER_SCHEMES, *SENTINEL_SCHEMES, *CLUSTER_SCHEMES)
TLS_SCHEMES: Final = ("rediss", "rediss-sentinel", "rediss-cluster")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A Redis URL, taken apart.

    Attributes:
        text: As given.
        scheme: One of `REDIS_SCHEMES`.
        addresses: Sentinels, or servers of the cluster to begin with; empty for one server.
        service: What the sentinels call the server.
        is_cluster: Whether it names a Redis Cluster.
        has_sentinels: Whether it names sentinels.
        has_tls: Whether connections are made over TLS.
    """

    text: str = field(repr=False)
    scheme: str
    addresses: tuple[Address, ...]
    service: str
    is_cluster: bool
    has_sentinels: bool
    has_tls: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a URL apart: `redis://`, `rediss://`, `unix://`;
        `redis[s]-sentinel://[user:password@]host:port,host:port/service`;
        `redis[s]-cluster://[user:password@]host:port,host:port`.

        Raises:
            ConfigError: It cannot be read. The message does not repeat it: it may hold a password.
        """
        try:
            scheme, path = urlsplit(text).scheme, urlsplit(text).path.strip("/")
            is_cluster, has_sentinels = scheme in CLUSTER_SCHEMES, scheme in SENTINEL_SCHEMES
            if scheme not in REDIS_SCHEMES or (is_cluster and path):
                raise ValueError("unknown scheme, or a path after a cluster")
            addresses: tuple[Address, ...] = ()
            if is_cluster or has_sentinels:
                default_port = DEFAULT_SENTINEL_PORT if has_sentinels else DEFAULT_PORT
                addresses = tuple(
                    _address_of(host, default_port) for host in _hosts_of(text).split(",")
                )
            service, has_tls = path or "mymaster", scheme in TLS_SCHEMES
            return cls(text, scheme, addresses, service, is_cluster, has_sentinels, has_tls)
        except ValueError:
            raise unreadable() from None

    @property
    def without_tls(self) -> str:
        """The URL of the same server without TLS."""
        return "redis" + self.text.removeprefix(self.scheme) if self.has_tls else self.text

    @property
    def credentials(self) -> tuple[str | None, str | None]:
        """User and password of the server."""
        user, _, password = urlsplit(self.text).netloc.rpartition("@")[0].partition(":")
        return unquote(user) or None, unquote(password) or None

    @property
    def where(self) -> str:
        """Which Redis it is, for people: hosts and ports, never credentials."""
        if self.scheme == "unix":
            return f"redis at {urlsplit(self.text).path}"
        addresses = self.addresses or (_address_of(_hosts_of(self.text), DEFAULT_PORT),)
        hosts = ", ".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses
        )
        if self.has_sentinels:
            return f"redis {self.service} of the sentinels {hosts}"
        return f"redis {'cluster ' if self.is_cluster else ''}at {hosts}"


def unreadable() -> ConfigError:
    """Make the error for a URL that cannot be read; it does not repeat the URL."""
    return ConfigError(
        "redis_url cannot be read; write redis://[user:password@]host:port[/database], and for"
        " others see its documentation"
    )


def _hosts_of(text: str) -> str:
    return urlsplit(text).netloc.rpartition("@")[2]


def _address_of(text: str, default_port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("an address without a host")
    return parts.hostname, parts.port or default_port
