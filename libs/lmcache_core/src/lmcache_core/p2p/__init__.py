"""Peers that serve one another's chunks: their addresses, the broker's client, and the lease that
keeps an instance registered.
"""

from lmcache_core.p2p.broker_client import BrokerClient
from lmcache_core.p2p.distributed_url import (
    DistributedUrl,
    distributed_url_of,
    is_encrypted,
    parse_distributed_url,
)
from lmcache_core.p2p.messages import (
    Assignment,
    CopyOrder,
    DrainReport,
    HeldBy,
    Lease,
    ModelFigures,
    Peer,
    PeerFigures,
    PeerKind,
    PeerStatus,
    TierFigures,
)
from lmcache_core.p2p.registration import LeaseListener, PeerRegistration

__all__ = [
    "BrokerClient",
    "PeerRegistration",
    "Assignment",
    "CopyOrder",
    "DrainReport",
    "HeldBy",
    "LeaseListener",
    "Lease",
    "Peer",
    "ModelFigures",
    "PeerFigures",
    "PeerKind",
    "PeerStatus",
    "TierFigures",
    "DistributedUrl",
    "distributed_url_of",
    "is_encrypted",
    "parse_distributed_url",
]
