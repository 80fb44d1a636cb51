"""JSON bodies of `/v1/peers`. Fields that we do not know are passed over: a newer peer must be able to register."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from lmcache_core.p2p import Peer, PeerKind, parse_distributed_url
from lmcache_core.security.names import INSTANCE_PATTERN
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

InstanceId = Annotated[str, StringConstraints(pattern=f"^{INSTANCE_PATTERN}$")]
PeerIdPath = Annotated[str, Path(pattern=f"^{INSTANCE_PATTERN}$", description="The peer's id.")]
TopologyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,253}$")]


def _check_distributed_url(url: str) -> str:
    parse_distributed_url(url)
    return url


class AnnounceBody(BaseModel):
    """What a peer says of itself."""

    model_config = ConfigDict(strict=True)

    incarnation: int = Field(ge=0, lt=1 << 63, description="Rises with every start of the peer.")
    distributed_url: Annotated[str, AfterValidator(_check_distributed_url)] = Field(description="lm://host:port")
    kind: PeerKind = "sidecar"
    zone: TopologyName = ""
    node: TopologyName = ""
    load: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False, description="0 is idle, 1 is full.")
    ttl_ms: int | None = Field(None, ge=100, lt=1 << 53, description="The lease asked for; the broker may grant less.")
    draining: bool = Field(False, description="The peer wants no new pulls in this incarnation.")

    def to_peer(self, peer_id: str) -> Peer:
        """The domain's view of it."""
        return Peer(
            id=peer_id,
            incarnation=self.incarnation,
            distributed_url=self.distributed_url,
            kind=self.kind,
            zone=self.zone,
            node=self.node,
        )


class LeaseView(BaseModel):
    """The lease that was granted."""

    model_config = ConfigDict(from_attributes=True)

    ttl_ms: int
    draining: bool


class PeerView(BaseModel):
    """A live peer."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    incarnation: int
    distributed_url: str
    kind: PeerKind
    zone: str
    node: str
    load: float
    draining: bool
    num_pulls: int = Field(description="Tickets to it that have not expired.")
    expires_in_ms: int = Field(description="What is left of its lease.")


class PeersView(BaseModel):
    """The live peers that the caller may see."""

    peers: list[PeerView]


class StatsView(BaseModel):
    """Figures of the peers that the caller may see."""

    num_peers: int
    num_draining: int
    num_pulls: int = Field(description="Tickets that have not expired.")
    max_pulls_per_peer: int
    num_waiting: int = Field(description="Requests, of all tenants, that wait for a place.")
    is_shared: bool = Field(description="Whether this broker knows now what the others know.")
