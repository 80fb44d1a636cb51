"""Options of the broker."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from lmcache_core.addresses import is_loopback
from lmcache_core.names import INSTANCE_PATTERN
from lmcache_core.p2p import PeerKind, parse_distributed_url
from lmcache_core.security import TicketKeyFile, TicketKeys, parse_ticket_keys, validate_tenant
from lmcache_servicekit.redis_settings import RedisSettings
from lmcache_servicekit.settings import URL_PATTERN, Port, ServiceSettings
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    field_validator,
    model_validator,
)

MAX_STATIC_PEERS = 4096


def _check_distributed_url(url: str) -> str:
    parse_distributed_url(url)
    return url


_TopologyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,253}$")]
_ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]


class StaticPeer(BaseModel):
    """A peer that is always there."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    id: Annotated[str, StringConstraints(pattern=f"^{INSTANCE_PATTERN}$")]
    """Its instance id."""
    distributed_url: Annotated[str, AfterValidator(_check_distributed_url)]
    """Where it serves, `lm://host:port`."""
    kind: PeerKind = "sidecar"
    """What it is."""
    zone: _TopologyName = ""
    """Failure domain."""
    node: _TopologyName = ""
    """Machine."""


class DiscoverySettings(ServiceSettings):
    """How peers are known apart from their registrations."""

    discovery: Literal["registration", "static", "kubernetes"] = "registration"
    """Source of peers in addition to their registrations: none, `static_peers`, or the endpoints of
    a Service.
    """
    discovery_tenant: Annotated[str, AfterValidator(validate_tenant)] | None = None
    """Tenant of discovered peers until they register; None: they serve all tenants."""
    static_peers: list[StaticPeer] = Field(default=[], max_length=MAX_STATIC_PEERS)
    """Peers that are always there."""
    kubernetes_service: _ClusterName | None = None
    """Headless Service whose endpoints are sidecars."""
    kubernetes_namespace: _ClusterName | None = None
    """Its namespace; None: this pod's."""
    kubernetes_port_name: str = Field(default="lm", min_length=1, max_length=15)
    """Name of its port for lm://."""
    kubernetes_port: int = Field(default=65_433, ge=1, le=65_535)
    """That port, if the Service does not name it."""
    kubernetes_tls: bool = False
    """Whether these sidecars encrypt (`lm+tls://`)."""
    kubernetes_api_url: str | None = Field(default=None, pattern=URL_PATTERN, max_length=300)
    """Another cluster's API server."""
    kubernetes_token_file: Path | None = None
    """Token for it."""
    kubernetes_ca_file: Path | None = None
    """Authority (PEM) of its certificate."""
    pod_deletion_cost: bool = False
    """Annotate pods with what deleting them would lose."""

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        if self.discovery == "kubernetes" and self.kubernetes_service is None:
            raise ValueError(
                "discovery=kubernetes, but kubernetes_service is not set: name the service whose"
                " endpoints are sidecars"
            )
        if self.pod_deletion_cost and self.discovery != "kubernetes":
            raise ValueError(
                f"pod_deletion_cost is set, but discovery={self.discovery}: set"
                " discovery=kubernetes, or leave it out"
            )
        if self.discovery != "static" and self.static_peers:
            raise ValueError(
                f"static_peers are given, but discovery={self.discovery}: set discovery=static, or"
                " leave them out"
            )
        return self


def api_url_of_pod() -> str | None:
    """Return the API's URL from the variables that Kubernetes sets in pods; None elsewhere."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return host and f"https://{f'[{host}]' if ':' in host else host}:{port}"


_EPHEMERAL_KEY_ID: Final = "ephemeral"


class BrokerSettings(DiscoverySettings, RedisSettings):
    """Options of the broker, apart from those of discovery and those that locate Redis, in which
    several brokers share leases and pulls.
    """

    about = (
        "Knows which peers are alive, decides which of them serves which chunks, and "
        "shows them on a web page."
    )
    env_prefix = "LMCACHE_BROKER_"

    port: Port = 8082
    """REST and the web page."""
    ticket_keys: SecretStr | None = None
    """Keys that sign tickets, `id:base64`, separated by commas; the first signs. None: a key of
    this process, which no peer knows.
    """
    ticket_keys_file: Path | None = None
    """The same, one per line."""
    ticket_ttl_ms: int = Field(default=5_000, ge=100, le=600_000)
    """Life of a ticket, and of a pull that is not renewed."""
    default_lease_ttl_ms: int = Field(default=15_000, ge=100, le=3_600_000)
    """Lease of a peer that asks for none."""
    max_lease_ttl_ms: int = Field(default=60_000, ge=100, le=3_600_000)
    """Longest lease."""
    max_peers: int = Field(default=4096, ge=1, le=65_536)
    """Live peers."""
    max_peers_per_tenant: int = Field(default=1024, ge=1, le=65_536)
    """Live peers of one tenant."""
    max_pulls_per_peer: int = Field(default=64, ge=1, le=65_536)
    """Concurrent pulls from one peer."""
    hot_chunk_pulls: int = Field(default=16, ge=0, le=1_000_000)
    """Pulls within a minute that make a chunk hot; 0: never."""
    hot_chunk_copies: int = Field(default=3, ge=1, le=16)
    """Wanted holders of a hot chunk."""
    history_interval_s: float = Field(default=10.0, ge=1.0, le=60.0, allow_inf_nan=False)
    """Interval of the page's history, which has 360."""
    page_title: str = Field(default="", max_length=200)
    """What the page calls this installation; the chart: release and namespace."""
    docs_url: str | None = Field(default=None, pattern=URL_PATTERN, max_length=300)
    """Where you serve the documentation; the page leads there."""
    redis_timeout_ms: int = Field(default=200, ge=1, le=60_000)
    """Longest wait for Redis; after it this broker answers from its own memory."""

    @field_validator("ticket_keys")
    @classmethod
    def _check_ticket_keys(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _parse(value)
        return value

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.ticket_keys is not None and self.ticket_keys_file is not None:
            raise ValueError("ticket_keys and ticket_keys_file are both set: set one of them")
        if (
            self.ticket_keys is None
            and self.ticket_keys_file is None
            and not is_loopback(self.host)
            and not self.allow_anonymous
        ):
            raise ValueError(
                f"host={self.host!r} is reachable from other machines, but neither ticket_keys nor"
                " ticket_keys_file is set: set one, or set allow_anonymous=true if peers take"
                " pulls without tickets"
            )
        if self.default_lease_ttl_ms > self.max_lease_ttl_ms:
            raise ValueError(
                f"default_lease_ttl_ms={self.default_lease_ttl_ms} is above"
                f" max_lease_ttl_ms={self.max_lease_ttl_ms}: lower the one or raise the other"
            )
        return self


def load_ticket_keys(settings: BrokerSettings) -> TicketKeys:
    """Return the keys that tickets are signed with, the signing one first. Reads the key file.

    Raises:
        ConfigError: The file cannot be read or holds no keys.
    """
    if settings.ticket_keys is not None:
        return _parse(settings.ticket_keys)
    if settings.ticket_keys_file is not None:
        return TicketKeyFile(settings.ticket_keys_file, "ticket_keys_file")
    return {_EPHEMERAL_KEY_ID: secrets.token_bytes(32)}


def _parse(keys: SecretStr) -> dict[str, bytes]:
    return parse_ticket_keys(keys.get_secret_value().split(","))
