"""The grammar of Redis URLs in services, and their options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import unquote, urlsplit

from lmcache_core.config.options import is_database
from lmcache_core.errors import ConfigError
from lmcache_core.security.tls import TlsFiles
from pydantic import AfterValidator, Field, SecretStr, model_validator

from lmcache_servicekit.settings import ServiceSettings

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
    """A parsed Redis URL.

    Attributes:
        text: As given.
        scheme: One of `REDIS_SCHEMES`.
        addresses: Sentinels, or servers of the cluster to begin with; empty for one server.
        service: Name of the server at the sentinels.
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
        """Parse a URL: `redis://`, `rediss://`, `unix://`;
        `redis[s]-sentinel://[user:password@]host:port,host:port/service`;
        `redis[s]-cluster://[user:password@]host:port,host:port`.

        Raises:
            ConfigError: It cannot be read. The message does not repeat it: it may contain a
                password.
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
            elif scheme != "unix":
                _address_of(_hosts_of(text), DEFAULT_PORT)
                if not is_database(urlsplit(text).path):
                    raise ValueError("redis-py takes a database that is no number for 0")
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
        """Name of this Redis for display: hosts and ports, never credentials."""
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
    """Return the error for a URL that cannot be read; it does not repeat the URL."""
    return ConfigError(
        "redis_url cannot be read; write redis://[user:password@]host:port[/number of a database],"
        " with / as %2F and @ as %40 in a password; for other schemes see its documentation"
    )


def _hosts_of(text: str) -> str:
    return urlsplit(text).netloc.rpartition("@")[2]


def _address_of(text: str, default_port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("an address without a host")
    return parts.hostname, parts.port or default_port


_TLS_PREFIXES: Final = tuple(f"{scheme}://" for scheme in TLS_SCHEMES)
_SENTINEL_PREFIXES: Final = tuple(f"{scheme}://" for scheme in SENTINEL_SCHEMES)
_PREFIXES: Final = tuple(f"{scheme}://" for scheme in REDIS_SCHEMES)


def _check_redis_url(url: SecretStr) -> SecretStr:
    """Check that it can be read. The text of the error does not repeat the URL: it may contain a
    password.
    """
    if not url.get_secret_value().startswith(_PREFIXES):
        raise ValueError(f"a Redis URL begins with one of {', '.join(_PREFIXES)}")
    try:
        RedisUrl.parse(url.get_secret_value())
    except ConfigError as exc:
        raise ValueError(str(exc)) from None
    return url


class RedisSettings(ServiceSettings):
    """Where Redis is, and the credentials for it."""

    redis_url: Annotated[SecretStr, AfterValidator(_check_redis_url)] | None = None
    """Where state is shared; None: it stays in this process, which must be the only replica.
    `redis://[user:password@]host:port[/database]`, `unix://[user:password@]/path`,
    `redis-sentinel://[user:password@]host:port,host:port/service` or
    `redis-cluster://[user:password@]host:port,host:port`; with `rediss` over TLS.
    """
    redis_tls_ca_file: Path | None = None
    """Authorities (PEM) for the servers' certificates; None: the system's."""
    redis_tls_cert_file: Path | None = None
    """Client certificate (PEM), if the servers want one."""
    redis_tls_key_file: Path | None = None
    """Its key (PEM, no passphrase), if not in the same file."""
    redis_sentinel_username: str | None = Field(default=None, min_length=1, max_length=255)
    """User at the sentinels, if not their default one."""
    redis_sentinel_password_file: Path | None = None
    """File with the sentinels' password, read for each connection; None: they want none. User and
    password in `redis_url` are the server's.
    """

    @model_validator(mode="after")
    def _check_redis_tls(self) -> Self:
        if self.redis_tls_key_file and not self.redis_tls_cert_file:
            raise ValueError(
                "redis_tls_key_file is set, but redis_tls_cert_file is not: set it, or leave the"
                " key out"
            )
        has_files = self.redis_tls_ca_file or self.redis_tls_cert_file
        if has_files and not self._redis_url_begins_with(_TLS_PREFIXES):
            raise ValueError(
                f"redis_tls_… files are set, but redis_url is none of {', '.join(_TLS_PREFIXES)}:"
                " write it so, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_sentinel_login(self) -> Self:
        if self.redis_sentinel_username and not self.redis_sentinel_password_file:
            raise ValueError(
                "redis_sentinel_username is set, but redis_sentinel_password_file is not: set it,"
                " or leave the name out"
            )
        if self.redis_sentinel_password_file and not self._redis_url_begins_with(
            _SENTINEL_PREFIXES
        ):
            raise ValueError(
                "redis_sentinel_password_file is set, but redis_url is neither of"
                f" {', '.join(_SENTINEL_PREFIXES)}: write it so, or leave it out"
            )
        return self

    @property
    def redis_tls(self) -> TlsFiles:
        """The files for TLS."""
        return TlsFiles.of(self, "redis_tls_cert_file", "redis_tls_key_file", "redis_tls_ca_file")

    def _redis_url_begins_with(self, schemes: tuple[str, ...]) -> bool:
        return self.redis_url is not None and self.redis_url.get_secret_value().startswith(schemes)
