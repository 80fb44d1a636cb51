"""Options of the storage."""

from __future__ import annotations

import ipaddress
from typing import Literal

from lmcache_core.errors import ConfigError
from lmcache_core.storage.remote.members import hosts_of
from lmcache_node.settings import BYTES_PER_GB, DistributedUrlText, Tenant
from lmcache_servicekit.settings import Port, is_loopback
from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from lmcache_storage.s3.settings import S3Settings

BYTES_PER_MB = 1 << 20


class StorageSettings(S3Settings):
    """Options that only the cache storage has; sizes are in GB (2^30 bytes) and MB (2^20 bytes).
    The role of `service_token_file` must be `storage` (or `admin`): other servers of the tier take
    chunks of all tenants only from it, and chunks of other tenants are announced under their names.

    Attributes:
        port: REST.
        memory_gb: Host memory for chunks, taken at the start.
        max_record_mb: Largest record that is taken.
        max_connections: lm:// connections at once.
        lmcache_compat_port: Port for unmodified LMCache clients; 0 takes a free one, unset: there
            is none.
        lmcache_compat_host: Where to serve them. They show no credentials: everyone who reaches
            this is served.
        lmcache_compat_dialect: What they speak: `v0.2` to release 0.3.2, `v0.3+` from 0.3.3 on.
        lmcache_compat_tenant: Whose namespace, quota and tiers they use; needed with
            lmcache_compat_port.
        lmcache_compat_max_connections: Their connections at once.
        advertise_url: Where others reach lm:// of this instance; by default lm_host and lm_port.
        replicas_url: All servers of this tier, `lm://host:port,host:port` or a name that leads to
            all of them, this one included: it gives them the chunks that belong there, all of them
            when it ends. By default those that the broker knows.
        rebalance: Move chunks to their homes when other servers have come or gone.
        hand_over_on_stop: Hand all chunks to the others also on SIGTERM; without it only `POST
            /v1/admin/drain` does.
    """

    env_prefix = "LMCACHE_STORAGE_"

    port: Port = 8080
    lm_port: Port = 65432
    memory_gb: float = Field(default=1.0, gt=0, le=65536)
    max_record_mb: int = Field(default=512, ge=1, le=4096)
    max_connections: int = Field(default=256, ge=1, le=65536)
    lmcache_compat_port: Port | None = None
    lmcache_compat_host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    lmcache_compat_dialect: Literal["v0.2", "v0.3+"] = "v0.3+"
    lmcache_compat_tenant: Tenant | None = None
    lmcache_compat_max_connections: int = Field(default=64, ge=1, le=65536)
    advertise_url: DistributedUrlText | None = None
    replicas_url: str | None = None
    rebalance: bool = True
    hand_over_on_stop: bool = True

    @property
    def memory_bytes(self) -> int:
        """`memory_gb` in bytes."""
        return int(self.memory_gb * BYTES_PER_GB)

    @property
    def max_record_bytes(self) -> int:
        """`max_record_mb` in bytes."""
        return self.max_record_mb * BYTES_PER_MB

    @field_validator("replicas_url")
    @classmethod
    def _check_replicas_url(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                hosts_of(value)
            except ConfigError as exc:
                raise ValueError(str(exc)) from exc
            if not value.startswith(("lm://", "lm+tls://")):
                raise ValueError("must be lm://host:port,host:port or lm+tls://…")
        return value

    @model_validator(mode="after")
    def _check_contradictions(self) -> StorageSettings:
        if (
            not is_loopback(self.lm_host)
            and self.auth_tokens_file is None
            and not self.allow_anonymous
        ):
            raise ValueError(
                f"lm_host={self.lm_host!r} is reachable from other machines, but auth_tokens_file"
                " is not set: set it, or set allow_anonymous=true if a NetworkPolicy is all the"
                " protection you want"
            )
        self.refuse_plaintext("lm_host", self.lm_host)
        self.check_scheme("advertise_url", self.advertise_url)
        if (
            self.broker_url is not None
            and self.advertise_url is None
            and _is_unspecified(self.lm_host)
        ):
            raise ValueError(
                f"broker_url is set and lm_host={self.lm_host!r} is no address that others can"
                " reach: set advertise_url=lm://host:port"
            )
        return self

    @override
    def listeners(self) -> dict[str, tuple[str, int]]:
        compat = self._optional(
            "lmcache_compat_port", self.lmcache_compat_host, self.lmcache_compat_port
        )
        return super().listeners() | compat

    @model_validator(mode="after")
    def _check_compat(self) -> StorageSettings:
        if self.lmcache_compat_port is None:
            return self
        if self.lmcache_compat_tenant is None:
            raise ValueError(
                f"lmcache_compat_port={self.lmcache_compat_port}: LMCache clients show no"
                " credentials; set lmcache_compat_tenant to the tenant that they are to be"
            )
        if not is_loopback(self.lmcache_compat_host) and not self.allow_anonymous:
            raise ValueError(
                f"lmcache_compat_host={self.lmcache_compat_host!r} is reachable from other"
                " machines, and LMCache clients show no credentials: set allow_anonymous=true if a"
                " NetworkPolicy is all the protection you want"
            )
        return self


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
