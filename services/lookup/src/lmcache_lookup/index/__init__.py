"""Places for the index: Redis for several replicas, this process for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_core.lookup.messages import EventsAck

from lmcache_lookup.index.base import (
    ClaimedElsewhereError,
    EventBatch,
    IndexEvent,
    LeaseClaim,
    LookupIndex,
)

if TYPE_CHECKING:
    from lmcache_lookup.settings import LookupSettings

__all__ = [
    "LookupIndex",
    "ClaimedElsewhereError",
    "LeaseClaim",
    "EventsAck",
    "IndexEvent",
    "EventBatch",
    "create_index",
]


def create_index(settings: LookupSettings) -> LookupIndex:
    """Create the index that the settings select, without connecting.

    Raises:
        ConfigError: The Redis URL, a file for TLS, or the sentinels' password cannot be read.
    """
    if settings.redis_url is None:
        from lmcache_lookup.index.embedded import EmbeddedIndex

        return EmbeddedIndex(
            settings.max_chunks,
            settings.max_instances,
            settings.max_chunks_per_tenant,
            settings.max_instances_per_tenant,
        )
    from lmcache_servicekit.redis_client import RedisAccess

    from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions

    access = RedisAccess.of(settings)
    assert access is not None
    options = RedisIndexOptions(
        read_timeout_s=settings.redis_timeout_ms / 1000,
        write_timeout_s=settings.redis_write_timeout_ms / 1000,
        max_instances=settings.max_instances,
        max_instances_per_tenant=settings.max_instances_per_tenant,
        max_chunks_per_tenant=settings.max_chunks_per_tenant,
    )
    return RedisIndex(access, options)
