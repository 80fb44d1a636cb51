"""Builds the tiers of a process, embedded engine or service, from one description.

    TierStack ─┬─ LocalCPUBackend                                   hot
               ├─ Guard(EncodedBackend(DiskBackend))           disk
               ├─ Guard(EncodedBackend(P2PBackend))                 peers, never written to
               ├─ Guard(EncodedBackend(remote tier of a URL))       remote
               └─ Guard(any other tier, such as a bucket)           further

Every slower tier has the same guard. Reads are priced if the reader can compute the KV instead
(engine, sidecar), but not in a server that stores chunks for others. A server without codecs stores
and returns records unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.record import Chunk
from lmcache_core.security import ClientTls, ShownToken
from lmcache_core.storage.base import OnRemoved, StorageBackend
from lmcache_core.storage.eviction import DEFAULT_POLICY, TierLimits, create_policy
from lmcache_core.storage.guard import Guard, GuardOptions
from lmcache_core.storage.hot import LocalCPUBackend, OnKept
from lmcache_core.storage.stack import StackListener, TierStack

if TYPE_CHECKING:
    from lmcache_core.p2p.pull import PulledBytes
    from lmcache_core.storage.codecs import Codecs
    from lmcache_core.storage.disk import DiskBackend
    from lmcache_core.storage.peer import P2PBackend
    from lmcache_core.storage.remote import Locate


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpec:
    """The host-memory tier.

    Attributes:
        on_kept: Called with every chunk that the tier stores; see `LocalCPUBackend`.
    """

    memory: MemoryAllocatorInterface
    limits: TierLimits = field(default_factory=TierLimits)
    on_kept: OnKept | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpec:
    """The disk tier.

    Attributes:
        capacity_bytes: Hard bound on its content.
        fsync: Wait for the device before a chunk counts as stored.
        serde: Encoding of raw chunks there; one of the codecs.
    """

    path: Path
    capacity_bytes: int
    limits: TierLimits = field(default_factory=TierLimits)
    fsync: bool = False
    serde: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSpec:
    """The peer tier.

    Attributes:
        backend: Made by the caller, which owns its clients.
    """

    backend: P2PBackend
    accepts_lossy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSpec:
    """The remote tier.

    Attributes:
        url: See `create_remote_backend`.
        serde: Encoding of raw chunks there; one of the codecs.
        locate: Finds the one of several servers that holds a chunk.
    """

    url: str
    timeout_s: float
    token: ShownToken = field(default=None, repr=False)
    serde: str | None = None
    tls: ClientTls | None = None
    locate: Locate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersSpec:
    """The tiers of a process.

    Attributes:
        disk: The disk tier; None here and below: there is no such tier.
        remote: A server or directory shared by many.
        further: The last tier, made by the caller, such as a bucket.
        policy: Eviction policy of the memory tier and the disk.
        codecs: Codecs with the serdes of disk and remote; None: records are neither encoded nor
            decoded.
        seals: Compute digests of decoded chunks, for a reader that will need them.
        stays_encoded: Which records are not decoded (`EncodedBackend`).
        is_priced: Read from a tier only what it can deliver faster than the reader computes it.
        guards: Options of the guards, by name of the tier.
        removed_from: Returns, for the name of a tier, the callback for every key it drops.
    """

    hot: HotSpec
    disk: DiskSpec | None = None
    peers: PeersSpec | None = None
    remote: RemoteSpec | None = None
    further: StorageBackend | None = None
    policy: str = DEFAULT_POLICY
    codecs: Codecs | None = None
    seals: bool = True
    stays_encoded: Callable[[Chunk], bool] = lambda record: False
    is_priced: bool = True
    guards: Mapping[str, GuardOptions] = field(default_factory=dict)
    removed_from: Callable[[str], OnRemoved | None] = lambda tier: None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSet:
    """Tiers, not opened yet.

    Attributes:
        lower: All slower tiers in their guards, fastest first.
        written: Those of them that every new chunk is written to.
        disk: The disk tier, bare: it can list its chunks. `lower` has it in its guard.
        remote: The remote tier with its codec but without its guard: it raises instead of missing.
        pulled: Bytes pulled, by peer.
    """

    hot: LocalCPUBackend
    lower: tuple[StorageBackend, ...] = ()
    written: tuple[StorageBackend, ...] = ()
    disk: DiskBackend | None = None
    remote: StorageBackend | None = None
    pulled: PulledBytes | None = None

    @property
    def local(self) -> tuple[LocalCPUBackend | DiskBackend, ...]:
        """Return the bare tiers that keep chunks in this pod."""
        return (self.hot,) if self.disk is None else (self.hot, self.disk)

    def guarded(self, name: str) -> StorageBackend | None:
        """Return the slower tier of that name in its guard; None if there is none."""
        return next((tier for tier in self.lower if tier.name == name), None)

    def stack(
        self,
        listener: StackListener | None = None,
        *,
        keep_hot: bool = True,
        pending_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> TierStack:
        """Return the tiers as one store; for the arguments see `TierStack`."""
        return TierStack(
            self.hot,
            self.lower,
            written=self.written,
            listener=listener,
            keep_hot=keep_hot,
            pending_bytes=pending_bytes,
        )


def build_tiers(spec: TiersSpec, hot: LocalCPUBackend | None = None) -> TierSet:
    """Build the tiers of a process without opening them.

    Args:
        hot: An existing memory tier to keep, when only the slower ones are rebuilt.

    Raises:
        ConfigError: The policy is unknown or the URL is malformed.
    """
    if hot is None:
        hot = LocalCPUBackend(
            spec.hot.memory,
            create_policy(spec.policy),
            spec.removed_from(LocalCPUBackend.name),
            limits=spec.hot.limits,
            on_kept=spec.hot.on_kept,
        )
    disk = records = peers = None
    if spec.disk is not None:
        disk = _disk(spec, spec.disk)
        records = _decoded(spec, disk, spec.disk.serde)
    if spec.peers is not None:
        peers = _decoded(spec, spec.peers.backend, None, spec.peers.accepts_lossy)
    remote = None
    if spec.remote is not None:
        remote = _decoded(spec, _remote(spec, spec.remote), spec.remote.serde)

    def guarded(*tiers: StorageBackend | None) -> list[StorageBackend]:
        return [
            Guard(tier, spec.guards.get(tier.name), is_priced=spec.is_priced)
            for tier in tiers
            if tier is not None
        ]

    on_disk, pulling, distant = guarded(records), guarded(peers), guarded(remote, spec.further)
    return TierSet(
        hot=hot,
        lower=(*on_disk, *pulling, *distant),
        written=(*on_disk, *distant),
        disk=disk,
        remote=remote,
        pulled=None if spec.peers is None else spec.peers.backend.pulled,
    )


def _disk(spec: TiersSpec, disk: DiskSpec) -> DiskBackend:
    from lmcache_core.storage.disk import DiskBackend

    return DiskBackend(
        disk.path,
        disk.capacity_bytes,
        create_policy(spec.policy),
        spec.removed_from(DiskBackend.name),
        disk.fsync,
        limits=disk.limits,
    )


def _remote(spec: TiersSpec, remote: RemoteSpec) -> StorageBackend:
    from lmcache_core.storage.remote import create_remote_backend
    from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts

    accepts = ONLY_LOSSLESS
    if spec.codecs is not None:
        accepts = Accepts(spec.codecs.is_lossy(remote.serde), frozenset(spec.codecs.decodable()))
    return create_remote_backend(
        remote.url,
        remote.token,
        remote.timeout_s,
        accepts=accepts,
        locate=remote.locate,
        tls=remote.tls,
    )


def _decoded(
    spec: TiersSpec, tier: StorageBackend, serde: str | None, accepts_lossy: bool | None = None
) -> StorageBackend:
    if spec.codecs is None:
        return tier
    from lmcache_core.storage.encoded import EncodedBackend

    return EncodedBackend(tier, spec.codecs, serde, accepts_lossy, spec.seals, spec.stays_encoded)
