"""`POST /v1/events`."""

from __future__ import annotations

from fastapi import APIRouter
from lmcache_servicekit.auth import ClientPrincipal

from lmcache_lookup.dependencies import Events
from lmcache_lookup.events.schemas import EventsAnswerBody, EventsBody

router = APIRouter(prefix="/v1", tags=["events"])


@router.post("/events", summary="Report stores and removals")
async def take_events(body: EventsBody, caller: ClientPrincipal, service: Events) -> EventsAnswerBody:
    """A batch that was taken before is skipped; a gap takes nothing and asks for a resync."""
    state = await service.take(caller, body)
    return EventsAnswerBody(next_sequence=state.next_sequence, resync=state.resync)
