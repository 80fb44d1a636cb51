"""The implementations that options select by name, and the only place to add one.

Modules are named, not imported: they are in a higher layer, and imported on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_STORAGE = "lmcache_core.storage"

DEFAULT_EVICTION_POLICY: Final = "adaptive"
EVICTION_POLICIES = MappingProxyType(
    {
        "adaptive": f"{_STORAGE}.eviction.adaptive:AdaptivePolicy",
        "s3fifo": f"{_STORAGE}.eviction.s3fifo:S3FIFOPolicy",
        "lru": f"{_STORAGE}.eviction.lru:LRUPolicy",
    }
)
"""Values of `eviction_policy`, each with its class."""


@dataclass(frozen=True, slots=True)
class RemoteScheme:
    """The implementation of a scheme of `remote_url`.

    Attributes:
        module: Its `create` makes the tier.
        takes_token: Whether the protocol has a bearer token.
    """

    module: str
    takes_token: bool = False


REMOTE_SCHEMES = MappingProxyType(
    {
        "lm": RemoteScheme(f"{_STORAGE}.remote.lm", takes_token=True),
        "lm+tls": RemoteScheme(f"{_STORAGE}.remote.lm", takes_token=True),
        "redis": RemoteScheme(f"{_STORAGE}.remote.redis"),
        "rediss": RemoteScheme(f"{_STORAGE}.remote.redis"),
        "redis-sentinel": RemoteScheme(f"{_STORAGE}.remote.redis"),
        "file": RemoteScheme(f"{_STORAGE}.remote.file"),
    }
)
"""Schemes of `remote_url`, each with its tier."""

FOREIGN_SCHEMES = MappingProxyType(
    {
        "http": "write lm://host:port of the same service; its REST API is no tier",
        "https": "write lm+tls://host:port of the same service; its REST API is no tier",
        "s3": "a bucket is cache_storage's: set storage.s3 of the chart, or its s3_bucket",
        "resp": "write redis://user:password@host:port, all percent-encoded",
        "valkey": "write redis://user:password@host:port/database, all percent-encoded",
        "redis-cluster": "a cluster is no remote tier here; name one server, redis://host:port",
        "unix": "Redis is reached over TCP; write redis://host:port",
        "fs": "write file:///dir, a directory that all can reach",
    }
)
"""Schemes that have no tier here, LMCache's among them, each with what to do instead."""
