"""The index's interface: the holders of chunks, under leases and numbered events.

Every implementation passes the suite in `tests/contract/lookup_index`. The rules are those of
`docs/protocols.md`, lookup:

- A lease belongs to (owner, instance), where the owner is the tenant of the token that took it.
- Entries count only while the lease of their instance lives in their incarnation.
- Events of an incarnation are numbered from 0. What was taken before is skipped, a gap takes
  nothing.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lmcache_core.errors import CapacityError, UnavailableError
from lmcache_core.lookup import Holder, InstanceKind
from lmcache_core.lookup.messages import EventsAck, InstanceEntry, StatsAnswer

MAX_STORED_HOLDERS_PER_CHUNK: Final = 64


class ClaimedElsewhereError(UnavailableError):
    """Another replica is taking events of this instance, or was until it failed. The index is
    there: trying again in a moment helps.
    """


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """A lease to take or renew; `ttl_ms` is the life granted."""

    instance: str
    incarnation: int
    kind: InstanceKind
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """A store or a removal.

    Attributes:
        op: Which.
        tenant: Namespace of the chunk.
        chunk_id: 16 bytes.
        tier: Where in the instance.
        size_bytes: Size of the record; 0 for a removal.
    """

    op: Literal["store", "remove"]
    tenant: str
    chunk_id: bytes
    tier: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one instance with consecutive numbers from `first_sequence` on."""

    instance: str
    incarnation: int
    first_sequence: int
    events: Sequence[IndexEvent]


def check_places(
    fits: bool, owner_fits: bool, max_instances: int, max_instances_per_tenant: int
) -> None:
    """Raise `CapacityError` where there is no place for one more lease."""
    if not owner_fits:
        raise CapacityError(
            f"max_instances_per_tenant={max_instances_per_tenant}: this tenant has as many live"
            " instances; raise it"
        )
    if not fits:
        raise CapacityError(
            f"max_instances={max_instances}: as many live instances hold leases; raise it"
        )


class LookupIndex(abc.ABC):
    """The holders of each chunk.

    Every method but the constructor may raise `UnavailableError`: the place where the index lives
    did not answer in time. Then it is unknown whether a write was taken; all writes may be
    repeated.
    """

    name: str
    """The implementation, for people."""
    where = "this process"
    """Where it lives, for people."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Get ready. Does not wait for a server that is away."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Give back connections and memory."""

    @abc.abstractmethod
    async def ping(self) -> None:
        """Ask the place where the index lives whether it is there."""

    @abc.abstractmethod
    async def renew(self, owner: str, claim: LeaseClaim) -> EventsAck:
        """Take or renew a lease.

        A higher incarnation replaces a lower one and begins at sequence 0; a lower one than that of
        a live lease changes nothing and has to resync; a lease that ran out begins at sequence
        0, whatever its incarnation.

        Raises:
            CapacityError: Too many instances hold leases.
        """

    @abc.abstractmethod
    async def end(self, owner: str, instance: str, incarnation: int | None = None) -> bool:
        """End a lease: its entries are dead at once.

        Args:
            owner: The tenant that took it.
            instance: Whose.
            incarnation: End it only if it is this one's.

        Returns:
            Whether there was such a lease.
        """

    @abc.abstractmethod
    async def apply(self, owner: str, batch: EventBatch) -> EventsAck:
        """Take events in order, skipping those that were taken before; takes none after a gap or
        without a live lease.
        """

    @abc.abstractmethod
    async def holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        """Return the holders of each chunk, in one round trip.

        Returns:
            One list for each chunk id, empty where no live instance holds it. Not to be changed:
            chunks may share a list.
        """

    @abc.abstractmethod
    async def instances(self, owner: str) -> list[InstanceEntry]:
        """Return the live leases that `owner` took, sorted by instance."""

    @abc.abstractmethod
    async def evict(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        """Forget the holders of these chunks.

        Returns:
            How many were known.
        """

    @abc.abstractmethod
    async def clear(self, tenant: str) -> None:
        """Forget all chunks of a tenant, and let the instances whose leases it took announce
        theirs again.
        """

    @abc.abstractmethod
    async def sweep(self) -> int:
        """Do a bounded part of a round trip through the index that clears dead entries.

        Returns:
            How many entries were cleared.
        """

    @abc.abstractmethod
    async def stats(self, tenant: str) -> StatsAnswer:
        """Return figures of one tenant: its chunks, and the instances whose leases it took."""

    @abc.abstractmethod
    async def tenants(self) -> list[str]:
        """Return the tenants in whose namespaces chunks were stored, sorted; some may have none any
        more.
        """
