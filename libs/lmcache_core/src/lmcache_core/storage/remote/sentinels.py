"""A set of Redis sentinels that may be asked by several calls at once."""

from __future__ import annotations

import copy

from redis.asyncio.sentinel import Sentinel


class SteadySentinels(Sentinel):
    """redis-py's sentinels, of which none gets lost.

    redis-py moves the sentinel that answered to the front of its list. Two calls at once may then
    write one sentinel twice and another not at all: it is asked no more, and never closed. Here
    each call has a list of its own.
    """

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return host and port of the master; see `Sentinel.discover_master`."""
        own = copy.copy(self)
        own.sentinels = list(self.sentinels)
        found: tuple[str, int] = await Sentinel.discover_master(own, service_name)
        self.sentinels = own.sentinels
        return found
