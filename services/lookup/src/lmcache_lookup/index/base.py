"""The index's interface: the holders of chunks, under leases and numbered events.

Every implementation passes the suite in `tests/contract/lookup_index`. The rules are those of
`docs/protocols.md`, lookup:

- A lease belongs to (owner, instance), where the owner is the tenant of the token that took it, or
  `SHARED_OWNER` for the roles that speak for all tenants. The owner's leases count against its own
  bound; those of tenants also against the common one, which so cannot keep a storage server out.
- Entries count only while the lease of their instance lives in their incarnation.
- Events of an incarnation are numbered from 0. Those applied before are skipped; after a gap
  nothing is applied.
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
    """Another replica is processing events of this instance, or was until it failed. The index is
    available: retrying in a moment helps.
    """


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """A lease to take or renew; `ttl_ms` is the lifetime granted."""

    instance: str
    incarnation: int
    kind: InstanceKind
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """A store or a removal.

    Attributes:
        chunk_id: 16 bytes.
        size_bytes: Size of the record; 0 for a removal.
    """

    op: Literal["store", "remove"]
    tenant: str
    chunk_id: bytes
    tier: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one instance with consecutive numbers from `first_sequence`."""

    instance: str
    incarnation: int
    first_sequence: int
    events: Sequence[IndexEvent]


def check_places(
    fits: bool, owner_fits: bool, max_instances: int, max_instances_per_tenant: int
) -> None:
    """Raise `CapacityError` if there is no room for one more lease."""
    if not owner_fits:
        raise CapacityError(
            f"max_instances_per_tenant={max_instances_per_tenant}: this tenant already has this"
            " many live instances; raise the limit"
        )
    if not fits:
        raise CapacityError(
            f"max_instances={max_instances}: this many live instances hold leases; raise the limit"
        )


class LookupIndex(abc.ABC):
    """The holders of each chunk.

    Every method except the constructor may raise `UnavailableError` if the storage of the index did
    not answer in time. Whether a write took effect is then unknown; all writes may be repeated.
    """

    name: str
    """Name of the implementation, for display."""
    where = "this process"
    """Location of the index, for display."""
    num_dropped = 0
    """Chunks with a live holder that were dropped to keep a bound, until this is set to 0."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Prepare for use. Does not wait for an unavailable server."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections and memory."""

    @abc.abstractmethod
    async def ping(self) -> None:
        """Check that the storage of the index responds."""

    @abc.abstractmethod
    async def renew(self, owner: str, claim: LeaseClaim) -> EventsAck:
        """Take or renew a lease.

        A higher incarnation replaces a lower one and begins at sequence 0; one lower than that of a
        live lease changes nothing and must resync; after an expired lease any incarnation begins at
        sequence 0.

        Raises:
            CapacityError: Too many instances hold leases.
        """

    @abc.abstractmethod
    async def end(self, owner: str, instance: str, incarnation: int | None = None) -> bool:
        """End a lease: its entries are dead immediately.

        Args:
            incarnation: End it only if it belongs to this incarnation.

        Returns:
            Whether there was such a lease.
        """

    @abc.abstractmethod
    async def apply(self, owner: str, batch: EventBatch) -> EventsAck:
        """Apply events in order, skipping those applied before; apply none after a gap or without a
        live lease.
        """

    @abc.abstractmethod
    async def holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]]:
        """Return the holders of each chunk, in one round trip.

        Returns:
            One list per chunk id, empty if no live instance holds it. Do not modify: chunks may
                share a list.
        """

    @abc.abstractmethod
    async def instances(self, owner: str) -> list[InstanceEntry]:
        """Return the live leases of `owner`, sorted by instance."""

    @abc.abstractmethod
    async def evict(self, tenant: str, chunk_ids: Sequence[bytes]) -> int:
        """Forget the holders of these chunks.

        Returns:
            How many chunks were known.
        """

    @abc.abstractmethod
    async def clear(self, tenant: str) -> None:
        """Forget all chunks of a tenant, and make instances announce theirs again: those with its
        leases and with shared ones, which may hold chunks of all tenants.
        """

    @abc.abstractmethod
    async def sweep(self) -> int:
        """Clear dead entries in a bounded part of the index; repeated calls cover all of it.

        Returns:
            How many entries were cleared.
        """

    @abc.abstractmethod
    async def stats(self, tenant: str) -> StatsAnswer:
        """Return figures of one tenant: its chunks, and the instances with its leases or shared
        ones.
        """

    @abc.abstractmethod
    async def tenants(self) -> list[str]:
        """Return the tenants for which chunks were stored, sorted; some may have none left."""
