"""The lookup service's options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from lmcache_servicekit.settings import Port, ServiceSettings
from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

_TLS_SCHEMES: Final = ("rediss://", "rediss-sentinel://", "rediss-cluster://")
_SENTINEL_SCHEMES: Final = ("redis-sentinel://", "rediss-sentinel://")
_REDIS_SCHEMES: Final = ("redis://", "redis-sentinel://", "redis-cluster://", *_TLS_SCHEMES, "unix://")


def _check_redis_url(url: SecretStr) -> SecretStr:
    """The text of the error does not repeat the URL: it may hold a password."""
    if not url.get_secret_value().startswith(_REDIS_SCHEMES):
        raise ValueError(f"a Redis URL begins with one of {', '.join(_REDIS_SCHEMES)}")
    return url


class LookupSettings(ServiceSettings):
    """Options of `lmcache-lookup`; variables are `LMCACHE_LOOKUP_…`.

    Attributes:
        workers: Processes that serve the port; more than one needs `redis_url`.
        redis_url: Where the index lives, password included; None keeps it in this process, which then must be the only replica. One of
            `redis://[user:password@]host:port[/database]`, `unix://[user:password@]/path`,
            `redis-sentinel://[user:password@]host:port,host:port/service` and `redis-cluster://[user:password@]host:port,host:port`
            (a few servers of the cluster to begin with); with `rediss` for `redis`, over TLS.
        redis_tls_ca_file: Authorities (PEM), one of which must have signed the servers' certificates; None: those of the system.
        redis_tls_cert_file: Our certificate (PEM), where the servers want one.
        redis_tls_key_file: The certificate's key (PEM, no passphrase), where it is not in the same file.
        redis_sentinel_username: Who asks the sentinels, where that is not their default user.
        redis_sentinel_password_file: File with the password that sentinels want; None: they want none. Read again for each new connection.
            User and password in `redis_url` are the server's.
        redis_timeout_ms: Limit on the index's part of a lookup; after it the answer is "nothing known".
        redis_write_timeout_ms: Limit on the index's part of leases and events.
        entry_ttl_s: What nobody has written to for this long leaves Redis by itself, in seconds.
        max_chunks: Bound on chunks of the index in this process.
        max_instances: Bound on instances that hold a lease.
        default_ttl_ms: Lease of an instance that asks for none.
        min_ttl_ms: Shortest lease that is granted.
        max_ttl_ms: Longest lease that is granted.
        sweep_interval_s: Pause between two steps that clear entries of ended leases, in seconds.
    """

    model_config = SettingsConfigDict(env_prefix="LMCACHE_LOOKUP_")

    port: Port = 8081
    workers: int = Field(default=1, ge=1, le=64)
    redis_url: Annotated[SecretStr, AfterValidator(_check_redis_url)] | None = None
    redis_tls_ca_file: Path | None = None
    redis_tls_cert_file: Path | None = None
    redis_tls_key_file: Path | None = None
    redis_sentinel_username: str | None = Field(default=None, min_length=1, max_length=255)
    redis_sentinel_password_file: Path | None = None
    redis_timeout_ms: int = Field(default=100, ge=1, le=60_000)
    redis_write_timeout_ms: int = Field(default=800, ge=1, le=60_000)
    entry_ttl_s: int = Field(default=86_400, ge=60)
    max_chunks: int = Field(default=1_000_000, ge=1)
    max_instances: int = Field(default=4096, ge=1, le=65_536)
    default_ttl_ms: int = Field(default=15_000, ge=1)
    min_ttl_ms: int = Field(default=1_000, ge=1)
    max_ttl_ms: int = Field(default=300_000, ge=1)
    sweep_interval_s: float = Field(default=0.25, gt=0, le=3600)

    @model_validator(mode="after")
    def _check_redis_tls(self) -> LookupSettings:
        if self.redis_tls_key_file and not self.redis_tls_cert_file:
            raise ValueError("redis_tls_key_file is set, but redis_tls_cert_file is not: set it, or leave the key out")
        has_files = self.redis_tls_ca_file or self.redis_tls_cert_file
        if has_files and not self._redis_url_begins_with(_TLS_SCHEMES):
            raise ValueError(
                f"redis_tls_… files are set, but redis_url is none of {', '.join(_TLS_SCHEMES)}: write it so, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_sentinel_login(self) -> LookupSettings:
        if self.redis_sentinel_username and not self.redis_sentinel_password_file:
            raise ValueError("redis_sentinel_username is set, but redis_sentinel_password_file is not: set it, or leave the name out")
        if self.redis_sentinel_password_file and not self._redis_url_begins_with(_SENTINEL_SCHEMES):
            raise ValueError(
                f"redis_sentinel_password_file is set, but redis_url is neither of {', '.join(_SENTINEL_SCHEMES)}: "
                "write it so, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_ttls(self) -> LookupSettings:
        if not self.min_ttl_ms <= self.default_ttl_ms <= self.max_ttl_ms:
            given = f"min_ttl_ms={self.min_ttl_ms}, default_ttl_ms={self.default_ttl_ms}, max_ttl_ms={self.max_ttl_ms}"
            raise ValueError(f"{given}: put them in ascending order")
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> LookupSettings:
        if self.workers > 1 and self.redis_url is None:
            raise ValueError(f"workers={self.workers}: an index in the process cannot be shared; set redis_url, or workers=1")
        return self

    def _redis_url_begins_with(self, schemes: tuple[str, ...]) -> bool:
        return self.redis_url is not None and self.redis_url.get_secret_value().startswith(schemes)

    def granted_ttl_ms(self, asked_ttl_ms: int | None) -> int:
        """The lease that an instance gets which asks for `asked_ttl_ms`."""
        return min(max(asked_ttl_ms or self.default_ttl_ms, self.min_ttl_ms), self.max_ttl_ms)
