"""A peer that was seen from outside."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.p2p import PeerKind


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a list or the cluster tells of a peer.

    Attributes:
        id: The instance's id; in a cluster the pod's name.
        distributed_url: Where it serves.
        kind: What it is.
        zone: Failure domain, or empty.
        node: Machine, or empty.
        is_ready: It may be asked for chunks, though it has not registered.
        is_leaving: It is about to end.
    """

    id: str
    distributed_url: str
    kind: PeerKind = "sidecar"
    zone: str = ""
    node: str = ""
    is_ready: bool = True
    is_leaving: bool = False
