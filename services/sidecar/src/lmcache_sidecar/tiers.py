"""The sidecar's tiers, as its settings name them."""

from __future__ import annotations

from functools import partial

from lmcache_core.lookup import LookupClient
from lmcache_core.p2p import BrokerClient
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.security import ClientTls, ShownToken
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.peer import PEER_TIER, P2PBackend
from lmcache_core.storage.remote.members import locate_by_lookup
from lmcache_core.storage.tiers import (
    HotSpec,
    PeersSpec,
    RemoteSpec,
    TierSet,
    TiersSpec,
    build_tiers,
)
from lmcache_core.wire.capabilities import Accepts
from lmcache_node.node import disk_spec

from lmcache_sidecar.settings import SidecarSettings


def build_sidecar_tiers(
    settings: SidecarSettings,
    hot: HotSpec,
    codecs: Codecs,
    announcer: TierAnnouncer,
    token: ShownToken,
    tls: ClientTls,
    clients: tuple[LookupClient, BrokerClient] | None,
) -> TierSet:
    """Build all tiers, peers only where lookup and broker are known. Nothing is opened.

    Each has a codec, since others may have written what lies there: engines are handed nothing
    that was not asked for.

    Args:
        settings: Which there are.
        hot: Shared memory.
        codecs: Made with the serdes of the settings.
        announcer: Told of what the tiers give up.
        token: What the remote tier is shown.
        tls: Whom to trust behind `lm+tls://` and `https://`, and what to show there.
        clients: Of lookup and broker.
    """
    peers = remote = None
    if clients is not None:
        # Peers encode as they are set; what is taken from them is what this sidecar would send.
        accepts = Accepts(codecs.is_lossy(settings.peer_serde), frozenset(codecs.decodable()))
        instance, timeout_s = settings.instance_id, settings.tier_timeout_s
        pool = PeerPool(instance, PEER_TIER, timeout_s, accepts=accepts, tls=tls)
        backend = P2PBackend(instance, *clients, pool)
        peers = PeersSpec(backend=backend, accepts_lossy=accepts.lossy)
    if settings.remote_url is not None:
        remote = RemoteSpec(
            url=settings.remote_url,
            timeout_s=settings.tier_timeout_s,
            token=token,
            serde=settings.remote_serde,
            tls=tls,
            locate=None if clients is None else partial(locate_by_lookup, clients[0]),
        )
    return build_tiers(
        TiersSpec(
            hot=hot,
            disk=disk_spec(settings, settings.disk_serde),
            peers=peers,
            remote=remote,
            policy=settings.eviction_policy,
            codecs=codecs,
            removed_from=announcer.removed_from,
        )
    )
