"""Where the index's keys lie: the interface of one server and of a cluster."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_lookup.index.base import EventBatch, LeaseState
from lmcache_lookup.index.redis_node import Argument, Command, Script, call


@dataclass(frozen=True, slots=True)
class Taking:
    """A batch of events, and what bounds its entries.

    Attributes:
        field: The lease's.
        batch: The events.
        max_holders: Of a chunk.
        max_bucket_chunks: Chunks of one bucket; beyond it one of them is forgotten for another.
    """

    field: str
    batch: EventBatch
    max_holders: int
    max_bucket_chunks: int

    @property
    def incarnation(self) -> str:
        """As scripts compare it."""
        return incarnation_text(self.batch.incarnation)

    @property
    def tenants(self) -> list[str]:
        """In whose namespaces the events are."""
        return sorted({event.tenant for event in self.batch.events})


@dataclass(frozen=True, slots=True)
class MastersSeen:
    """Which processes hold a cluster's slots, and since when they have what is in its buckets.

    Attributes:
        epoch: The cluster's; an older one is an older picture.
        run_ids: Sorted, with commas; nothing where there is no cluster, or not all of them
            answered.
        marks: Of all buckets, with commas; a bucket that was emptied has a newer one. Nothing where
            `run_ids` is, or one refused.
    """

    epoch: int = 0
    run_ids: str = ""
    marks: str = ""


class RedisShards(abc.ABC):
    """Carries out commands where their keys lie. Methods raise what redis-py raises; callers bound
    them in time.

    A command (but not a script) on a value of another type than ours answers None, as for a key
    that is absent.
    """

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    @abc.abstractmethod
    async def ping(self) -> None:
        """Ask every server whether it is there."""

    @abc.abstractmethod
    async def many(self, commands: Sequence[Command]) -> list[Any]:
        """Independent commands, one round trip to each server.

        Raises:
            ResponseError: One was refused, after all were answered.
            RedisError, OSError: One was not answered; it may have been done.
        """

    @abc.abstractmethod
    async def take(self, taking: Taking) -> LeaseState:
        """See `LookupIndex.apply`.

        Raises:
            ClaimedElsewhereError: Another replica is taking events of this instance.
        """

    @abc.abstractmethod
    async def masters_seen(self) -> MastersSeen:
        """Which processes would hold what was written lately."""

    async def run(self, script: Script, keys: Sequence[str], argv: Sequence[Argument]) -> Any:
        """Run a script whose keys are of one hash slot."""
        return (await self.many([call(script, keys, argv)]))[0]


def incarnation_text(incarnation: int) -> str:
    """As scripts compare it: 20 digits."""
    return f"{incarnation:020d}"
