"""Options of the storage."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from lmcache_core.addresses import is_loopback
from lmcache_core.errors import ConfigError
from lmcache_core.storage.remote.members import hosts_of
from lmcache_node.settings import BYTES_PER_GB, DistributedUrlText, NodeSettings, Tenant
from lmcache_servicekit.settings import Port, is_unspecified
from pydantic import Field, field_validator, model_validator
from typing_extensions import override

BYTES_PER_MB = 1 << 20
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)*")
MAX_PREFIX_CHARS = 256


def environ() -> Mapping[str, str]:
    """Return the variables of this process, in which Amazon's platforms say where keys are."""
    return os.environ


class S3Settings(NodeSettings):
    """Options of a bucket of S3-compatible object storage, behind memory and disk."""

    s3_bucket: str | None = None
    """An existing bucket; None: no bucket, and no other `s3_` option."""
    s3_prefix: str = Field(default="lmcache/", max_length=MAX_PREFIX_CHARS)
    """Prefix of all objects' names; servers of one tier share bucket and prefix."""
    s3_endpoint_url: str | None = None
    """`https://host:port` of a server other than Amazon's; `http://` sends chunks unencrypted."""
    s3_region: str = Field(
        default="us-east-1", min_length=1, max_length=63, pattern=r"^[A-Za-z0-9-]+$"
    )
    """Region that requests are signed for."""
    s3_path_style: bool = True
    """Name the bucket in the path of URLs, not in their host (Amazon's way)."""
    s3_ca_file: Path | None = None
    """Further trusted authorities (PEM), read at the start."""
    s3_access_key_file: Path | None = None
    """Id of the access key. This file and the next are read again when they change. Without them,
    credentials come from `AWS_…` variables, a web identity, or the role of container or machine.
    """
    s3_secret_key_file: Path | None = None
    """The key's secret."""
    s3_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Longest request to the bucket; reads also end at `tier_timeout_s`."""

    @field_validator("s3_bucket")
    @classmethod
    def _check_bucket(cls, value: str | None) -> str | None:
        if value is not None and not _BUCKET.fullmatch(value):
            raise ValueError("must be the name of a bucket: letters, digits, '.', '_' and '-'")
        return value

    @field_validator("s3_prefix")
    @classmethod
    def _check_prefix(cls, value: str) -> str:
        if not _PREFIX.fullmatch(value):
            raise ValueError(
                "must be empty, or names of letters, digits, '.', '_' and '-' that each end with"
                " '/', such as 'team/kv/'"
            )
        return value

    @field_validator("s3_endpoint_url")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if (
                parts.scheme not in ("http", "https")
                or not parts.hostname
                or parts.query
                or parts.fragment
                or parts.path.strip("/")
            ):
                raise ValueError(
                    "must be http://host:port or https://host:port and nothing behind it"
                )
            if parts.username is not None or parts.password is not None:
                raise ValueError(
                    "must hold no credentials: set s3_access_key_file and s3_secret_key_file"
                )
        return value

    @model_validator(mode="after")
    def _check_s3(self) -> S3Settings:
        if self.s3_bucket is None:
            fields = type(self).model_fields.items()
            alone = sorted(
                name
                for name, field in fields
                if name.startswith("s3_") and getattr(self, name) != field.default
            )
            if alone:
                raise ValueError(
                    f"{alone[0]} is set, but s3_bucket is not: set it, or leave"
                    f" {', '.join(alone)} out"
                )
        if (self.s3_access_key_file is None) != (self.s3_secret_key_file is None):
            raise ValueError(
                "s3_access_key_file and s3_secret_key_file go together: set both or none"
            )
        return self


class StorageSettings(S3Settings):
    """Options that only the cache storage has; sizes are in GB (2^30 bytes) and MB (2^20 bytes).
    The role of `service_token_file` must be `storage` (or `admin`): other servers of the tier take
    chunks of all tenants only from it, and chunks of other tenants are announced under their names.
    """

    about = "Keeps chunks of KV in memory, on disk and in a bucket, and serves them to all pods."
    env_prefix = "LMCACHE_STORAGE_"

    port: Port = 8080
    """REST."""
    lm_port: Port = 65432
    memory_gb: float = Field(default=1.0, gt=0, le=65536)
    """Host memory for chunks, allocated at the start."""
    max_record_mb: int = Field(default=512, ge=1, le=4096)
    """Largest record."""
    max_connections: int = Field(default=256, ge=1, le=65536)
    """Authenticated lm:// connections."""
    lmcache_compat_port: Port | None = None
    """Port for unmodified LMCache clients; None: they are not served."""
    lmcache_compat_host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """Its address. These clients show no credentials: everyone who reaches it is served."""
    lmcache_compat_dialect: Literal["v0.2", "v0.3+"] = "v0.3+"
    """`v0.2` up to LMCache 0.3.2, `v0.3+` from 0.3.3."""
    lmcache_compat_tenant: Tenant | None = None
    """Their tenant; needed with `lmcache_compat_port`."""
    lmcache_compat_max_connections: int = Field(default=64, ge=1, le=65536)
    """Their connections."""
    advertise_url: DistributedUrlText | None = None
    """Where others reach lm:// of this server; None: `lm_host` and `lm_port`."""
    replicas_url: str | None = None
    """All servers of this tier, this one included: `lm://host:port,host:port` or a name with
    several addresses; None: those that the broker knows.
    """
    rebalance: bool = True
    """Move chunks to their home servers when servers come or go."""
    hand_over_on_stop: bool = True
    """Give all chunks to the other servers on SIGTERM, not only on `POST /v1/admin/drain`."""

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
            if not value.startswith(("lm://", "lm+tls://")):
                raise ValueError("must be lm://host:port,host:port or lm+tls://…")
            try:
                hosts_of(value)
            except ConfigError as exc:
                raise ValueError(str(exc)) from exc
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
            and is_unspecified(self.lm_host)
        ):
            raise ValueError(
                f"broker_url is set and lm_host={self.lm_host!r} is not an address others can"
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
                " credentials; set lmcache_compat_tenant to the tenant that they belong to"
            )
        if not is_loopback(self.lmcache_compat_host) and not self.allow_anonymous:
            raise ValueError(
                f"lmcache_compat_host={self.lmcache_compat_host!r} is reachable from other"
                " machines, and LMCache clients show no credentials: set allow_anonymous=true if a"
                " NetworkPolicy is all the protection you want"
            )
        return self
