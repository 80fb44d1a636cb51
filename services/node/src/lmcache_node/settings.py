"""Settings that both kinds of node have: tiers, quotas, lm://, lookup and broker, TLS to others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.errors import ConfigError
from lmcache_core.p2p import is_encrypted, parse_distributed_url
from lmcache_core.security import validate_tenant
from lmcache_core.storage.eviction import DEFAULT_POLICY, POLICIES, TenantQuotas, TierLimits
from lmcache_core.wire.json_http import check_base_url
from lmcache_servicekit.settings import Port, ServiceSettings
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from typing_extensions import override

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
BYTES_PER_GB = 1 << 30
MAX_GB = 1 << 20
MAX_TTL_S = 10 * 365 * 86400


def _check_service_url(value: str) -> str:
    try:
        check_base_url("its", value)
    except ConfigError as exc:
        raise ValueError(str(exc)) from None
    return value


def _check_distributed_url(value: str) -> str:
    parse_distributed_url(value)
    return value


ServiceUrl = Annotated[str, AfterValidator(_check_service_url)]
"""Where another service is: `http://host:port` or `https://host:port`."""
DistributedUrlText = Annotated[str, AfterValidator(_check_distributed_url)]
"""Where others reach lm:// of this node."""
Tenant = Annotated[str, AfterValidator(validate_tenant)]
QuotaGb = Annotated[float, Field(gt=0, le=MAX_GB)]


class TenantQuotaSettings(BaseModel):
    """Space for the chunks of one tenant, GB (2^30 bytes)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True
    )

    memory_gb: QuotaGb | None = None
    """Host memory; None: `tenant_quota_gb`."""
    disk_gb: QuotaGb | None = None
    """Disk; None: `tenant_disk_quota_gb`."""


class NodeSettings(ServiceSettings):
    """Base of the settings of a service that keeps chunks; sizes are in GB (2^30 bytes). A
    subclass sets a default for `lm_port`.
    """

    disk_path: Path | None = None
    """Directory of the disk tier, owned by one process; None: no disk tier."""
    disk_gb: float = Field(default=0.0, ge=0, le=MAX_GB)
    """Disk space for chunks."""
    disk_fsync: bool = Field(default=False, description=OPTIONS["disk_fsync"].meaning)
    eviction_policy: PolicyName = Field(
        default=DEFAULT_POLICY, description=OPTIONS["eviction_policy"].meaning
    )
    chunk_ttl_s: float | None = Field(
        default=None, gt=0, le=MAX_TTL_S, description=OPTIONS["chunk_ttl_s"].meaning
    )
    tenant_quota_gb: QuotaGb | None = None
    """One tenant's share of host memory; None: no limit."""
    tenant_disk_quota_gb: QuotaGb | None = None
    """One tenant's share of the disk; None: no limit."""
    tenant_quotas: dict[Tenant, TenantQuotaSettings] = Field(default_factory=dict)
    """Exceptions from these two, by tenant."""
    tls_ca_file: Path | None = None
    """Authorities (PEM) trusted at `https://` and `lm+tls://`; None: the machine's. This file and
    the next two are read again when they change.
    """
    tls_client_cert_file: Path | None = None
    """Certificate (PEM) shown there."""
    tls_client_key_file: Path | None = None
    """Its key (PEM, no passphrase), if not in the same file."""
    tls_peer_name: str | None = Field(default=None, min_length=1, max_length=253)
    """Name in the certificates at `lm+tls://`; None: the URL's host."""
    lm_host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """Address of lm://."""
    lm_port: Port
    """Port of lm://."""
    lookup_url: ServiceUrl | None = Field(default=None, description=OPTIONS["lookup_url"].meaning)
    broker_url: ServiceUrl | None = Field(default=None, description=OPTIONS["broker_url"].meaning)
    service_token_file: Path | None = None
    """Token shown to lookup, broker, storage and peers."""
    tenant: Tenant = "default"
    """Namespace of that token."""
    zone: str = Field(default="", max_length=253)
    """Failure domain; the broker prefers close peers."""
    node: str = Field(default="", max_length=253)
    """Machine, for the same."""
    tier_timeout_s: float = Field(default=2.0, gt=0, le=3600)
    """Longest wait of a request for slower tiers."""
    drain_timeout_s: float = Field(default=10.0, ge=0, le=3600)
    """How long pending writes and the handover may take at the end."""

    @property
    def disk_bytes(self) -> int:
        """`disk_gb` in bytes."""
        return int(self.disk_gb * BYTES_PER_GB)

    @property
    def memory_limits(self) -> TierLimits:
        """Return what the memory tier refuses although it has room."""
        return self._limits(
            self.tenant_quota_gb,
            {tenant: quota.memory_gb for tenant, quota in self.tenant_quotas.items()},
        )

    @property
    def disk_limits(self) -> TierLimits:
        """Return what the disk tier refuses although it has room."""
        return self._limits(
            self.tenant_disk_quota_gb,
            {tenant: quota.disk_gb for tenant, quota in self.tenant_quotas.items()},
        )

    @model_validator(mode="after")
    def _check_disk(self) -> NodeSettings:
        if self.disk_path is None and self.disk_gb:
            raise ValueError(f"disk_gb={self.disk_gb}, but disk_path is not set: set both or none")
        if self.disk_path is not None and not self.disk_gb:
            raise ValueError(
                f"disk_path={str(self.disk_path)!r}, but disk_gb is not set: set both or none"
            )
        disk_quotas = [
            self.tenant_disk_quota_gb,
            *(quota.disk_gb for quota in self.tenant_quotas.values()),
        ]
        if self.disk_path is None and any(disk_quotas):
            raise ValueError(
                "tenant_disk_quota_gb or disk_gb in tenant_quotas is set, but there is no disk: set"
                " disk_path or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_client_tls(self) -> NodeSettings:
        if self.tls_client_key_file is not None and self.tls_client_cert_file is None:
            raise ValueError(
                "tls_client_key_file is set, but tls_client_cert_file is not: set it, or leave the"
                " key out"
            )
        return self

    @override
    def listeners(self) -> dict[str, tuple[str, int]]:
        return super().listeners() | {"lm_port": (self.lm_host, self.lm_port)}

    def check_scheme(self, option: str, url: str | None) -> None:
        """Check the URL at which others reach lm:// of this service.

        Args:
            option: Name of the URL's option.

        Raises:
            ValueError: The URL is unencrypted, which this service does not accept.
        """
        if url is not None and self.tls_cert_file is not None and not is_encrypted(url):
            raise ValueError(
                f"{option}={url!r}, but with tls_cert_file what is served there is encrypted: write"
                " lm+tls://"
            )

    def _limits(
        self, default_gb: float | None, by_tenant_gb: Mapping[str, float | None]
    ) -> TierLimits:
        by_tenant = {
            tenant: int(gb * BYTES_PER_GB) for tenant, gb in by_tenant_gb.items() if gb is not None
        }
        if default_gb is None and not by_tenant:
            return TierLimits(self.chunk_ttl_s)
        return TierLimits(
            self.chunk_ttl_s,
            TenantQuotas(None if default_gb is None else int(default_gb * BYTES_PER_GB), by_tenant),
        )
