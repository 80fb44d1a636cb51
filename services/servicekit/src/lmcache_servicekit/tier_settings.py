"""The settings of services that keep chunks: their disk tier, and what goes when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lmcache_core.errors import ConfigError
from lmcache_core.p2p import is_encrypted
from lmcache_core.security import validate_tenant
from lmcache_core.storage.eviction import DEFAULT_POLICY, POLICIES, TenantQuotas, TierLimits
from lmcache_core.wire.json_http import check_base_url
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lmcache_servicekit.settings import ServiceSettings

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


ServiceUrl = Annotated[str, AfterValidator(_check_service_url)]
"""Where another service is: `http://host:port` or `https://host:port`."""
QuotaGb = Annotated[float, Field(gt=0, le=MAX_GB)]


class TenantQuotaSettings(BaseModel):
    """What the chunks of one tenant may take, GB (2^30 bytes).

    Attributes:
        memory_gb: Of host memory; none: what `tenant_quota_gb` says.
        disk_gb: Of the disk; none: what `tenant_disk_quota_gb` says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    memory_gb: QuotaGb | None = None
    disk_gb: QuotaGb | None = None


class TierSettings(ServiceSettings):
    """Base of the settings of a service with a memory and a disk tier; sizes are in GB (2^30
    bytes).

    Attributes:
        disk_path: Directory of the disk tier, or none. One process owns it.
        disk_gb: Disk space for chunks.
        disk_fsync: Wait for the disk at each chunk, so that a power failure costs none.
        eviction_policy: Which chunks go first when a tier is full.
        chunk_ttl_s: How long a chunk is served after it was stored here, seconds; none: for ever. A
            restart does not prolong it.
        tenant_quota_gb: What the chunks of one tenant may take of host memory; none: as much as
            there is.
        tenant_disk_quota_gb: The same for the disk.
        tenant_quotas: Quotas of single tenants, by name, instead of these two.
        tls_ca_file: Authorities (PEM), one of which must have signed the certificates of those that
            this service calls by `https://` or `lm+tls://`; None: whom this machine trusts. Read
            again when it changes, as the next two.
        tls_client_cert_file: Certificate (PEM) that is shown to them.
        tls_client_key_file: Its key (PEM, no passphrase), where it is not in the same file.
        tls_peer_name: What certificates behind `lm+tls://` name; None: the host of the URL.
    """

    disk_path: Path | None = None
    disk_gb: float = Field(default=0.0, ge=0, le=MAX_GB)
    disk_fsync: bool = False
    eviction_policy: PolicyName = DEFAULT_POLICY
    chunk_ttl_s: float | None = Field(default=None, gt=0, le=MAX_TTL_S)
    tenant_quota_gb: QuotaGb | None = None
    tenant_disk_quota_gb: QuotaGb | None = None
    tenant_quotas: dict[Annotated[str, AfterValidator(validate_tenant)], TenantQuotaSettings] = (
        Field(default_factory=dict)
    )
    tls_ca_file: Path | None = None
    tls_client_cert_file: Path | None = None
    tls_client_key_file: Path | None = None
    tls_peer_name: str | None = Field(default=None, min_length=1, max_length=253)

    @property
    def disk_bytes(self) -> int:
        """`disk_gb` in bytes."""
        return int(self.disk_gb * BYTES_PER_GB)

    @property
    def memory_limits(self) -> TierLimits:
        """What the memory tier does not keep although it has room."""
        return self._limits(
            self.tenant_quota_gb,
            {tenant: quota.memory_gb for tenant, quota in self.tenant_quotas.items()},
        )

    @property
    def disk_limits(self) -> TierLimits:
        """What the disk tier does not keep although it has room."""
        return self._limits(
            self.tenant_disk_quota_gb,
            {tenant: quota.disk_gb for tenant, quota in self.tenant_quotas.items()},
        )

    @model_validator(mode="after")
    def _check_disk(self) -> TierSettings:
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
    def _check_client_tls(self) -> TierSettings:
        if self.tls_client_key_file is not None and self.tls_client_cert_file is None:
            raise ValueError(
                "tls_client_key_file is set, but tls_client_cert_file is not: set it, or leave the"
                " key out"
            )
        return self

    def check_scheme(self, option: str, url: str | None) -> None:
        """For the URL that others reach lm:// of this service at.

        Args:
            option: That names it.
            url: A distributed URL, or none.

        Raises:
            ValueError: It tells others to come unencrypted, whom this service would not understand.
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
