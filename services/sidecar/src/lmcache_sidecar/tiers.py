"""The sidecar's tiers, as its settings name them."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.lookup import LookupClient
from lmcache_core.memory import ArenaAllocator
from lmcache_core.p2p import BrokerClient
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.p2p.pull_parts import PulledBytes
from lmcache_core.security import ClientTls, ShownToken
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.disk import LocalDiskBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend, OnKept
from lmcache_core.storage.peer import PEER_TIER, P2PBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.remote.locating import LookupLocator
from lmcache_core.storage.wrappers import (
    BreakerBackend,
    EncodedBackend,
    MeteredBackend,
    TracedBackend,
)
from lmcache_core.storage.wrappers.priced import PricedBackend
from lmcache_core.wire.capabilities import Accepts

from lmcache_sidecar.settings import SidecarSettings


@dataclass(frozen=True, slots=True)
class SidecarTiers:
    """Tiers, not opened.

    Attributes:
        hot: Shared memory.
        local: Those that keep chunks in this pod, bare.
        lower: All slower ones, fastest first, in their wrappers.
        written: Those of them that every new chunk is written to.
        disk: The disk tier without what stands before it in case it fails; None without one.
        remote: The same of the remote tier.
        pulled: What came from peers; None without them.
    """

    hot: LocalCPUBackend
    local: tuple[LocalCPUBackend | LocalDiskBackend, ...]
    lower: tuple[StorageBackend, ...]
    written: tuple[StorageBackend, ...]
    disk: StorageBackend | None = None
    remote: StorageBackend | None = None
    pulled: PulledBytes | None = None

    @property
    def listed(self) -> LocalDiskBackend | None:
        """The disk tier, which lists what it holds; None without one."""
        return next((tier for tier in self.local if isinstance(tier, LocalDiskBackend)), None)


class TierMaker:
    """Makes tiers. Each has a door, since others may have written what lies there: engines are
    handed nothing that was not asked for.

    Args:
        settings: Which there are.
        announcer: Hears of what they give up.
        codecs: Made with the serdes of the settings.
        token: What the remote tier is shown.
        tls: Whom to trust behind `lm+tls://` and `https://`, and what to show there.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        announcer: TierAnnouncer,
        codecs: Codecs,
        token: ShownToken,
        tls: ClientTls,
    ) -> None:
        self._settings = settings
        self._announcer = announcer
        self._codecs = codecs
        self._token = token
        self._tls = tls

    def make(
        self,
        memory: ArenaAllocator,
        on_kept: OnKept | None,
        lookup: LookupClient | None,
        broker: BrokerClient | None,
    ) -> SidecarTiers:
        """All tiers; peers only where both lookup and broker are known.

        Args:
            memory: Cuts the arena.
            on_kept: Hears of what the hot tier keeps.
            lookup: The lookup service.
            broker: The broker.
        """
        settings = self._settings
        hot = LocalCPUBackend(
            memory,
            create_policy(settings.eviction_policy),
            self._announcer.removed_from(LocalCPUBackend.name),
            limits=settings.memory_limits,
            on_kept=on_kept,
        )
        disk = self._disk()
        decoded = (
            None
            if disk is None
            else EncodedBackend(disk, self._codecs, settings.disk_serde, seals=True)
        )
        remote = None if settings.remote_url is None else self._remote(settings.remote_url, lookup)
        on_disk = () if decoded is None else (self._guarded(decoded),)
        pulling = None if lookup is None or broker is None else self._peers(lookup, broker)
        peers = () if pulling is None else (self._guarded(self._decoded(pulling)),)
        distant = () if remote is None else (self._guarded(remote),)
        local = (hot,) if disk is None else (hot, disk)
        return SidecarTiers(
            hot,
            local,
            (*on_disk, *peers, *distant),
            (*on_disk, *distant),
            decoded,
            remote,
            pulled=None if pulling is None else pulling.pulled,
        )

    def _disk(self) -> LocalDiskBackend | None:
        settings = self._settings
        if settings.disk_path is None:
            return None
        return LocalDiskBackend(
            settings.disk_path,
            settings.disk_bytes,
            create_policy(settings.eviction_policy),
            self._announcer.removed_from(LocalDiskBackend.name),
            settings.disk_fsync,
            limits=settings.disk_limits,
        )

    def _peers(self, lookup: LookupClient, broker: BrokerClient) -> P2PBackend:
        """They encode as they are set; what is taken from them is what this sidecar would send."""
        settings = self._settings
        accepts = self._accepts(settings.peer_serde)
        pool = PeerPool(
            settings.instance_id, PEER_TIER, settings.tier_timeout_s, accepts=accepts, tls=self._tls
        )
        return P2PBackend(settings.instance_id, lookup, broker, pool)

    def _decoded(self, peers: P2PBackend) -> StorageBackend:
        return EncodedBackend(
            peers,
            self._codecs,
            accepts_lossy=self._accepts(self._settings.peer_serde).lossy,
            seals=True,
        )

    def _remote(self, url: str, lookup: LookupClient | None) -> StorageBackend:
        settings = self._settings
        locate = None if lookup is None else LookupLocator(lookup)
        accepts = self._accepts(settings.remote_serde)
        timeout_s = settings.tier_timeout_s
        remote = create_remote_backend(
            url,
            token=self._token,
            timeout_s=timeout_s,
            accepts=accepts,
            locate=locate,
            tls=self._tls,
        )
        return EncodedBackend(remote, self._codecs, settings.remote_serde, seals=True)

    def _accepts(self, serde: str) -> Accepts:
        return Accepts(self._codecs.is_lossy(serde), frozenset(self._codecs.decodable()))

    @staticmethod
    def _guarded(tier: StorageBackend) -> StorageBackend:
        return PricedBackend(BreakerBackend(TracedBackend(MeteredBackend(tier))))
