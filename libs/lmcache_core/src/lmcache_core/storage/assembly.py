"""Which slower tiers an engine's config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.options import directory_of_url
from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.security import ClientTls, TlsFiles, TokenFile, client_context
from lmcache_core.storage.alone import Alone
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.eviction import TierLimits, create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.telemetry import Counters

if TYPE_CHECKING:
    from lmcache_core.storage.neighbours import Neighbours

BYTES_PER_GB = 1 << 30


def create_lower_tiers(
    config: LMCacheEngineConfig,
    counters: Counters | None = None,
    surroundings: Neighbours | Alone | None = None,
) -> list[StorageBackend]:
    """The tiers behind host memory, fastest first, not opened.

    Each encodes and decodes as its serde says, counts and (at debug level) logs its calls, is
    behind a breaker, since a disk can hang as well as a network, and measures what its reads cost,
    decoding included.

    Args:
        config: Which there are.
        counters: Where the work of codecs is counted.
        surroundings: What joins the engine to its peers; None: it has none.

    Raises:
        ConfigError: The token file cannot be read, the URL is not one, or a serde's packages are
            not installed.
    """
    from lmcache_core.storage.codecs import create_codecs
    from lmcache_core.storage.wrappers import (
        BreakerBackend,
        EncodedBackend,
        LoggedBackend,
        MeteredBackend,
        TracedBackend,
    )
    from lmcache_core.storage.wrappers.priced import PricedBackend

    disk_serde = config.local_disk_serde if config.local_disk is not None else None
    remote_serde = config.remote_serde if config.remote_url is not None else None
    codecs = create_codecs([disk_serde, remote_serde], decode_documented=True, counters=counters)
    seals = config.verify_hot != "never"
    around = surroundings or Alone()
    tiers: list[StorageBackend] = []
    if config.local_disk is not None:
        from lmcache_core.storage.disk import DiskBackend

        path = Path(directory_of_url(config.local_disk))
        capacity_bytes = int(config.max_local_disk_size * BYTES_PER_GB)
        limits = TierLimits(ttl_s=config.chunk_ttl_s)
        on_removed = around.removed_from(DiskBackend.name)
        policy = create_policy(config.eviction_policy)
        disk = DiskBackend(
            path, capacity_bytes, policy, on_removed, fsync=config.disk_fsync, limits=limits
        )
        around.note_disk(disk)
        tiers.append(EncodedBackend(disk, codecs, disk_serde, seals=seals))
    tiers += [
        EncodedBackend(peers, codecs, accepts_lossy=False, seals=seals)
        for peers in around.make_tiers()
    ]
    if config.remote_url is not None:
        from lmcache_core.storage.remote import create_remote_backend
        from lmcache_core.wire.capabilities import Accepts

        token = (
            None
            if config.remote_token_file is None
            else TokenFile(Path(config.remote_token_file), "remote_token_file")
        )
        accepts = Accepts(codecs.is_lossy(remote_serde), frozenset(codecs.decodable()))
        remote = create_remote_backend(
            config.remote_url,
            token,
            config.tier_timeout_s,
            accepts=accepts,
            locate=around.locate,
            tls=_tls(config),
        )
        tiers.append(EncodedBackend(remote, codecs, remote_serde, seals=seals))
    return [
        PricedBackend(BreakerBackend(TracedBackend(LoggedBackend(MeteredBackend(tier)))))
        for tier in tiers
    ]


def _tls(config: LMCacheEngineConfig) -> ClientTls | None:
    files = TlsFiles.named(
        config.remote_tls_cert_file, config.remote_tls_key_file, config.remote_tls_ca_file
    )
    return ClientTls(client_context(files, "remote_tls_cert_file")) if files.paths else None


def create_surroundings(config: LMCacheEngineConfig) -> Neighbours | Alone:
    """What joins the engine to its peers, if the config asks for any.

    Raises:
        ConfigError: A file or a URL cannot be read.
    """
    if not config.enable_p2p:
        return Alone()
    from lmcache_core.storage.neighbours import Neighbours

    return Neighbours(config)


def create_hot_tier(
    config: LMCacheEngineConfig,
    memory_allocator: MemoryAllocatorInterface,
    surroundings: Neighbours | Alone,
) -> LocalCPUBackend:
    """The tier in host memory."""
    on_removed = surroundings.removed_from(LocalCPUBackend.name)
    limits = TierLimits(ttl_s=config.chunk_ttl_s)
    return LocalCPUBackend(
        memory_allocator, create_policy(config.eviction_policy), on_removed, limits=limits
    )
