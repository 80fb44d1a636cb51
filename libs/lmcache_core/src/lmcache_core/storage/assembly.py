"""Which slower tiers an engine's config asks for."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.storage.base import StorageBackend

BYTES_PER_GB = 1 << 30


def create_lower_tiers(config: LMCacheEngineConfig) -> list[StorageBackend]:
    """The tiers behind host memory, fastest first, not opened; each behind a breaker, since a disk can hang as well as a network."""
    from lmcache_core.storage.wrappers import BreakerBackend

    tiers: list[StorageBackend] = []
    if config.local_disk is not None:
        from lmcache_core.storage.disk import LocalDiskBackend

        path = Path(unquote(urlsplit(config.local_disk).path))
        tiers.append(BreakerBackend(LocalDiskBackend(path, int(config.max_local_disk_size * BYTES_PER_GB))))
    if config.remote_url is not None:
        from lmcache_core.storage.remote import create_remote_backend

        tiers.append(BreakerBackend(create_remote_backend(config.remote_url, timeout_s=config.tier_timeout_s)))
    return tiers
