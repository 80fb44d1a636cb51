"""Takes events into the index, in the namespaces that the reporter may write to."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.lookup import StoreEvent
from lmcache_core.lookup.requests import EventsRequest, PackedEvent, PackedEventsRequest
from lmcache_core.security import Principal, speaks_for_all_tenants
from lmcache_servicekit.errors import PermissionDeniedError

from lmcache_lookup.index import EventBatch, IndexEvent, LeaseState, LookupIndex
from lmcache_lookup.metrics import LookupMetrics


class EventService:
    """Events of one instance at a time.

    Args:
        index: Who holds what.
        metrics: Where events are counted.
    """

    def __init__(self, index: LookupIndex, metrics: LookupMetrics) -> None:
        self._index = index
        self._metrics = metrics

    async def take(
        self, caller: Principal, body: EventsRequest | PackedEventsRequest
    ) -> LeaseState:
        """Take a batch.

        Raises:
            PermissionDeniedError: An event is in another tenant's namespace, and the caller's role
                speaks for its own alone.
            UnavailableError: The index is away; sending the batch again is safe.
        """
        told: Sequence[StoreEvent | PackedEvent] = body.events
        events = [
            IndexEvent(
                event.op, event.tenant or caller.tenant, chunk_id, event.tier, event.size_bytes
            )
            for event, chunk_id in zip(told, body.ids, strict=True)
        ]
        if not speaks_for_all_tenants(caller.role) and any(
            event.tenant != caller.tenant for event in events
        ):
            raise PermissionDeniedError(
                "reporting for another tenant needs a token with the role storage or admin"
            )
        state = await self._index.apply(
            caller.tenant, EventBatch(body.instance, body.incarnation, body.first_sequence, events)
        )
        self._metrics.resyncs.inc(state.resync)
        self._metrics.events.inc(0 if state.resync else len(events))
        return state
