"""`POST /v1/events`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from lmcache_core.lookup.messages import EventsAck
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_lookup.dependencies import Events
from lmcache_lookup.events.schemas import EVENTS
from lmcache_lookup.formats import answered
from lmcache_lookup.openapi import documented

router = APIRouter(prefix="/v1", tags=["events"], route_class=GuardedRoute)


@router.post("/events", summary="Report stores and removals", **documented(EVENTS, EventsAck))
async def take_events(request: Request, caller: ClientPrincipal, service: Events) -> Response:
    """A batch that was taken before is skipped; a gap takes nothing and asks for a resync."""
    state = await service.take(caller, await EVENTS.read(request))
    return answered(request, EventsAck(state.next_sequence, state.resync))
