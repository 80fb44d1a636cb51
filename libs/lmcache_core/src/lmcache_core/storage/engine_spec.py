"""Which tiers an engine's config asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.options import directory_of_url
from lmcache_core.memory.base import MemoryAllocatorInterface
from lmcache_core.security import ClientTls, TlsFiles, TokenFile, client_context
from lmcache_core.storage.eviction import TierLimits
from lmcache_core.storage.tiers import DiskSpec, HotSpec, PeersSpec, RemoteSpec, TiersSpec
from lmcache_core.telemetry import Counters

if TYPE_CHECKING:
    from lmcache_core.storage.peer_group import PeerGroup

BYTES_PER_GB = 1 << 30


def engine_spec(
    config: LMCacheEngineConfig,
    memory: MemoryAllocatorInterface,
    peers: PeerGroup | None = None,
    counters: Counters | None = None,
) -> TiersSpec:
    """Describe the tiers of an embedded engine.

    Args:
        config: Which there are.
        memory: Host memory for chunks.
        peers: What joins the engine to others; None: nothing does.
        counters: Where the work of codecs is counted.

    Raises:
        ConfigError: The token file or a TLS file cannot be read, or a serde's packages are not
            installed.
    """
    from lmcache_core.storage.codecs import create_codecs

    limits = TierLimits(ttl_s=config.chunk_ttl_s)
    disk = remote = None
    if config.local_disk is not None:
        disk = DiskSpec(
            path=Path(directory_of_url(config.local_disk)),
            capacity_bytes=int(config.max_local_disk_size * BYTES_PER_GB),
            limits=limits,
            fsync=config.disk_fsync,
            serde=config.local_disk_serde,
        )
    if config.remote_url is not None:
        token_file = config.remote_token_file
        remote = RemoteSpec(
            url=config.remote_url,
            timeout_s=config.tier_timeout_s,
            token=None if token_file is None else TokenFile(Path(token_file), "remote_token_file"),
            serde=config.remote_serde,
            tls=_tls(config),
            locate=None if peers is None else peers.locate,
        )
    serdes = [None if tier is None else tier.serde for tier in (disk, remote)]
    spec = TiersSpec(
        hot=HotSpec(memory=memory, limits=limits),
        disk=disk,
        remote=remote,
        policy=config.eviction_policy,
        codecs=create_codecs(serdes, decode_documented=True, counters=counters),
        seals=config.verify_hot != "never",
    )
    if peers is None:
        return spec
    return replace(
        spec, peers=PeersSpec(backend=peers.make_tier()), removed_from=peers.removed_from
    )


def _tls(config: LMCacheEngineConfig) -> ClientTls | None:
    files = TlsFiles.named(
        config.remote_tls_cert_file, config.remote_tls_key_file, config.remote_tls_ca_file
    )
    return ClientTls(client_context(files, "remote_tls_cert_file")) if files.paths else None
