"""Options of services whose state lies in Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from lmcache_core.security.tls import TlsFiles
from pydantic import AfterValidator, Field, SecretStr, model_validator

from lmcache_servicekit.redis_url import REDIS_SCHEMES, SENTINEL_SCHEMES, TLS_SCHEMES
from lmcache_servicekit.settings import ServiceSettings

_TLS_PREFIXES: Final = tuple(f"{scheme}://" for scheme in TLS_SCHEMES)
_SENTINEL_PREFIXES: Final = tuple(f"{scheme}://" for scheme in SENTINEL_SCHEMES)
_PREFIXES: Final = tuple(f"{scheme}://" for scheme in REDIS_SCHEMES)


def _check_redis_url(url: SecretStr) -> SecretStr:
    """The text of the error does not repeat the URL: it may hold a password."""
    if not url.get_secret_value().startswith(_PREFIXES):
        raise ValueError(f"a Redis URL begins with one of {', '.join(_PREFIXES)}")
    return url


class RedisSettings(ServiceSettings):
    """Where Redis is, and what it is shown.

    Attributes:
        redis_url: Password included; None: what would lie there stays in this process, which then
            must be the only replica. One of `redis://[user:password@]host:port[/database]`,
            `unix://[user:password@]/path`,
            `redis-sentinel://[user:password@]host:port,host:port/service` and
            `redis-cluster://[user:password@]host:port,host:port` (a few servers of the cluster to
            begin with); with `rediss` for `redis`, over TLS.
        redis_tls_ca_file: Authorities (PEM), one of which must have signed the servers'
            certificates; None: those of the system.
        redis_tls_cert_file: Our certificate (PEM), where the servers want one.
        redis_tls_key_file: The certificate's key (PEM, no passphrase), where it is not in the same
            file.
        redis_sentinel_username: Who asks the sentinels, where that is not their default user.
        redis_sentinel_password_file: File with the password that sentinels want; None: they want
            none. Read again for each new connection. User and password in `redis_url` are the
            server's.
    """

    redis_url: Annotated[SecretStr, AfterValidator(_check_redis_url)] | None = None
    redis_tls_ca_file: Path | None = None
    redis_tls_cert_file: Path | None = None
    redis_tls_key_file: Path | None = None
    redis_sentinel_username: str | None = Field(default=None, min_length=1, max_length=255)
    redis_sentinel_password_file: Path | None = None

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
        return TlsFiles(self.redis_tls_cert_file, self.redis_tls_key_file, self.redis_tls_ca_file)

    def _redis_url_begins_with(self, schemes: tuple[str, ...]) -> bool:
        return self.redis_url is not None and self.redis_url.get_secret_value().startswith(schemes)
