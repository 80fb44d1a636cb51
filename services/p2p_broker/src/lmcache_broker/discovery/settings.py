"""Options of discovery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from lmcache_core.p2p import PeerKind
from lmcache_core.security import validate_tenant
from lmcache_servicekit.settings import ServiceSettings
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from lmcache_broker.peers.schemas import DistributedUrlText, InstanceId, TopologyName

MAX_STATIC_PEERS = 4096

_ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]


class StaticPeer(BaseModel):
    """A peer that is always there.

    Attributes:
        id: Its instance id.
        distributed_url: Where it serves, `lm://host:port`.
        kind: `sidecar` or `storage`.
        zone: Failure domain.
        node: Machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: InstanceId
    distributed_url: DistributedUrlText
    kind: PeerKind = "sidecar"
    zone: TopologyName = ""
    node: TopologyName = ""


class DiscoverySettings(ServiceSettings):
    """How peers are known besides their registrations.

    Attributes:
        discovery: `registration` (not at all), `static` (`static_peers`) or `kubernetes` (the
            endpoints of a service).
        discovery_tenant: Whom peers belong to that are known in that way and have not registered;
            None: they serve all tenants.
        static_peers: Peers that are always there.
        kubernetes_service: Name of the (headless) service whose endpoints are sidecars.
        kubernetes_namespace: Its namespace; None: that of this pod.
        kubernetes_port_name: Its port for lm://.
        kubernetes_port: The same, where the service does not name it.
        kubernetes_tls: Whether they encrypt what they serve there, as `lm+tls://`.
        kubernetes_api_url: Instead of the API that this pod's cluster has.
        kubernetes_token_file: Token for `kubernetes_api_url`.
        kubernetes_ca_file: Who signed its certificate.
        pod_deletion_cost: Whether to tell the cluster, by an annotation of the pods, with which of
            them the least would be lost.
    """

    discovery: Literal["registration", "static", "kubernetes"] = "registration"
    discovery_tenant: Annotated[str, AfterValidator(validate_tenant)] | None = None
    static_peers: list[StaticPeer] = Field(default=[], max_length=MAX_STATIC_PEERS)
    kubernetes_service: _ClusterName | None = None
    kubernetes_namespace: _ClusterName | None = None
    kubernetes_port_name: str = Field(default="lm", min_length=1, max_length=15)
    kubernetes_port: int = Field(default=65_433, ge=1, le=65_535)
    kubernetes_tls: bool = False
    kubernetes_api_url: str | None = Field(
        default=None, pattern=r"^https?://[^@\s]+$", max_length=300
    )
    kubernetes_token_file: Path | None = None
    kubernetes_ca_file: Path | None = None
    pod_deletion_cost: bool = False

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
