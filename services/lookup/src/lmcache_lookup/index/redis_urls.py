"""What a Redis URL means for the index: servers that commands are sent to, of one kind or
another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmcache_core.security.tls import TlsFiles
from lmcache_servicekit import redis_target
from lmcache_servicekit.redis_target import Address, RedisLimits
from lmcache_servicekit.sentinel_login import SentinelLogin

from lmcache_lookup.index.redis_node import MAX_CONNECTIONS, RedisNode

__all__ = ["Address", "RedisTarget", "read_redis_url"]


@dataclass(frozen=True, slots=True)
class RedisTarget(redis_target.RedisTarget):
    """A Redis URL, taken apart."""

    def node(self, timeout_s: float) -> RedisNode:
        """The one server, or the one behind the sentinels. Connects to nothing.

        Raises:
            ConfigError: The URL or a file for TLS cannot be read.
        """
        client, sentinels = self.client(_limits(timeout_s))
        return RedisNode(client, sentinels)

    def members(self, timeout_s: float) -> Callable[[Address], RedisNode]:
        """Makes the servers of the cluster. Connects to nothing.

        Raises:
            ConfigError: A file for TLS cannot be read.
        """
        member = self.member(_limits(timeout_s))
        return lambda address: RedisNode(member(address))


def read_redis_url(
    url: str, tls: TlsFiles | None = None, login: SentinelLogin | None = None
) -> RedisTarget:
    """Take a URL apart (see `RedisTarget.read`).

    Raises:
        ConfigError: It cannot be read. The text does not repeat it: it may hold a password.
    """
    return RedisTarget.read(url, tls, login)


def _limits(timeout_s: float) -> RedisLimits:
    """A node sends again by itself."""
    return RedisLimits(timeout_s, MAX_CONNECTIONS, num_retries=0)
