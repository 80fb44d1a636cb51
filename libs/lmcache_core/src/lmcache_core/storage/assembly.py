"""Which slower tiers an engine's config asks for."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.errors import ConfigError
from lmcache_core.storage.base import StorageBackend

BYTES_PER_GB = 1 << 30


def create_lower_tiers(config: LMCacheEngineConfig) -> list[StorageBackend]:
    """The tiers behind host memory, fastest first, not opened.

    Each counts and (at debug level) logs its calls, is behind a breaker, since a disk can hang as well as a network, and measures what
    its reads cost.

    Raises:
        ConfigError: The token file cannot be read, or the URL is not one.
    """
    from lmcache_core.storage.wrappers import BreakerBackend, LoggedBackend, MeteredBackend
    from lmcache_core.storage.wrappers.priced import PricedBackend

    tiers: list[StorageBackend] = []
    if config.local_disk is not None:
        from lmcache_core.storage.disk import LocalDiskBackend
        from lmcache_core.storage.eviction import TierLimits, create_policy

        path = Path(unquote(urlsplit(config.local_disk).path))
        capacity_bytes = int(config.max_local_disk_size * BYTES_PER_GB)
        limits = TierLimits(ttl_s=config.chunk_ttl_s)
        tiers.append(LocalDiskBackend(path, capacity_bytes, create_policy(config.eviction_policy), fsync=config.disk_fsync, limits=limits))
    if config.remote_url is not None:
        from lmcache_core.storage.remote import create_remote_backend

        token = None if config.remote_token_file is None else _read_token(Path(config.remote_token_file))
        tiers.append(create_remote_backend(config.remote_url, token, config.tier_timeout_s))
    return [PricedBackend(BreakerBackend(LoggedBackend(MeteredBackend(tier)))) for tier in tiers]


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"remote_token_file={str(path)!r}: cannot be read: {exc}") from exc
    if not token:
        raise ConfigError(f"remote_token_file={str(path)!r}: is empty; it must hold the bearer token")
    return token
