"""The lookup service's client, and the reporter that keeps the service informed of what an instance
holds. No torch.
"""

from lmcache_core.lookup.client import LookupClient
from lmcache_core.lookup.messages import (
    MAX_CHUNKS_PER_LOOKUP,
    MAX_EVENTS_PER_BATCH,
    MAX_HOLDERS_PER_CHUNK,
    ContainsAnswer,
    EventsAck,
    Holder,
    Holding,
    InstanceKind,
    InstanceLease,
    LocationsAnswer,
    LookupAnswer,
    RouteAnswer,
    RouteEntry,
    StoreEvent,
)
from lmcache_core.lookup.reporter import InstanceReporter, Outbox, ReporterTiming

__all__ = [
    "LookupClient",
    "InstanceReporter",
    "ReporterTiming",
    "Outbox",
    "Holding",
    "Holder",
    "LookupAnswer",
    "RouteAnswer",
    "RouteEntry",
    "ContainsAnswer",
    "LocationsAnswer",
    "StoreEvent",
    "InstanceKind",
    "InstanceLease",
    "EventsAck",
    "MAX_CHUNKS_PER_LOOKUP",
    "MAX_EVENTS_PER_BATCH",
    "MAX_HOLDERS_PER_CHUNK",
]
