"""Options of the storage."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from lmcache_core.errors import ConfigError
from lmcache_core.p2p import parse_distributed_url
from lmcache_core.security import validate_tenant
from lmcache_core.storage.remote.addresses import hosts_of
from lmcache_servicekit.settings import Port, is_loopback
from lmcache_servicekit.tier_settings import BYTES_PER_GB, ServiceUrl
from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from lmcache_storage.s3.settings import S3Settings

BYTES_PER_MB = 1 << 20


class StorageSettings(S3Settings):
    """Options of the storage beside those of every tier and of the further store; sizes are in GB
    (2^30 bytes) and MB (2^20 bytes).

    Attributes:
        port: REST.
        lm_host: Where to serve lm://.
        lm_port: Port for lm://; 0 takes a free one.
        memory_gb: Host memory for chunks, taken at the start.
        max_record_mb: Largest record that is taken.
        max_connections: lm:// connections at once.
        lmcache_compat_port: Port for unmodified LMCache clients; 0 takes a free one, unset: there
            is none.
        lmcache_compat_host: Where to serve them. They show no credentials: whoever reaches this is
            served.
        lmcache_compat_dialect: What they speak: `v0.2` to release 0.3.2, `v0.3+` from 0.3.3 on.
        lmcache_compat_tenant: Whose namespace, quota and tiers they use; needed with
            lmcache_compat_port.
        lmcache_compat_max_connections: Their connections at once.
        lookup_url: The lookup service, which is told what this instance holds; or none.
        broker_url: The broker, which is told that this instance serves; or none.
        advertise_url: Where others reach lm:// of this instance; by default lm_host and lm_port.
        replicas_url: All servers of this tier, `lm://host:port,host:port` or a name that leads to
            all of them, this one included: it gives them the chunks that belong there, all of them
            when it ends. By default those that the broker knows.
        rebalance: Move chunks to their homes when other servers have come or gone.
        hand_over_on_stop: Hand all chunks to the others also on SIGTERM; without it only `POST
            /v1/admin/drain` does.
        service_token_file: Token that this service shows to lookup, broker and the other servers of
            its tier, which take chunks of all tenants only from the role `storage` (or `admin`).
        tenant: Tenant of that token; chunks of other tenants are announced under their names, which
            needs that role.
        zone: Failure domain of this instance.
        node: Machine of this instance.
        tier_timeout_s: Longest wait on the disk and the bucket for one request, seconds.
        drain_timeout_s: How long pending writes and the handover may take at the end, seconds.
    """

    model_config = SettingsConfigDict(env_prefix="LMCACHE_STORAGE_")

    port: Port = 8080
    lm_host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    lm_port: Port = 65432
    memory_gb: float = Field(default=1.0, gt=0, le=65536)
    max_record_mb: int = Field(default=512, ge=1, le=4096)
    max_connections: int = Field(default=256, ge=1, le=65536)
    lmcache_compat_port: Port | None = None
    lmcache_compat_host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    lmcache_compat_dialect: Literal["v0.2", "v0.3+"] = "v0.3+"
    lmcache_compat_tenant: str | None = None
    lmcache_compat_max_connections: int = Field(default=64, ge=1, le=65536)
    lookup_url: ServiceUrl | None = None
    broker_url: ServiceUrl | None = None
    advertise_url: str | None = None
    replicas_url: str | None = None
    rebalance: bool = True
    hand_over_on_stop: bool = True
    service_token_file: Path | None = None
    tenant: str = "default"
    zone: str = Field(default="", max_length=253)
    node: str = Field(default="", max_length=253)
    tier_timeout_s: float = Field(default=2.0, gt=0, le=3600)
    drain_timeout_s: float = Field(default=10.0, ge=0, le=3600)

    @property
    def memory_bytes(self) -> int:
        """`memory_gb` in bytes."""
        return int(self.memory_gb * BYTES_PER_GB)

    @property
    def max_record_bytes(self) -> int:
        """`max_record_mb` in bytes."""
        return self.max_record_mb * BYTES_PER_MB

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, value: str) -> str:
        return validate_tenant(value)

    @field_validator("lmcache_compat_tenant")
    @classmethod
    def _check_compat_tenant(cls, value: str | None) -> str | None:
        return None if value is None else validate_tenant(value)

    @field_validator("advertise_url")
    @classmethod
    def _check_advertise_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_distributed_url(value)
        return value

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

    def listeners(self) -> dict[str, tuple[str, int]]:
        """See `ServiceSettings.listeners`."""
        compat = self._optional(
            "lmcache_compat_port", self.lmcache_compat_host, self.lmcache_compat_port
        )
        return super().listeners() | {"lm_port": (self.lm_host, self.lm_port)} | compat

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
