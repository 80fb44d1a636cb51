"""Bodies of events."""

from __future__ import annotations

from typing import Final

from lmcache_core.lookup.requests import EventsRequest, PackedEventsRequest

from lmcache_lookup.formats import Body

EVENTS: Final = Body(EventsRequest, PackedEventsRequest)
