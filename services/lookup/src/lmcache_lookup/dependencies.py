"""What routes ask for: the parts that the lifespan has put into the app.

All of these are coroutines: FastAPI runs plain functions in a thread, which costs more than all the
rest of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request

from lmcache_lookup.events.service import EventService
from lmcache_lookup.index import LookupIndex
from lmcache_lookup.lookup.service import LookupService
from lmcache_lookup.metrics import LookupMetrics
from lmcache_lookup.settings import LookupSettings


@dataclass(frozen=True, slots=True)
class LookupParts:
    """The parts of one app."""

    settings: LookupSettings
    index: LookupIndex
    metrics: LookupMetrics
    lookup: LookupService
    events: EventService


def set_parts(app: FastAPI, parts: LookupParts) -> None:
    """Put the parts into an app."""
    app.state.lookup_parts = parts


async def get_parts(request: Request) -> LookupParts:
    """The parts of the app that serves `request`."""
    parts: Any = request.app.state.lookup_parts
    assert isinstance(parts, LookupParts)
    return parts


Parts = Annotated[LookupParts, Depends(get_parts)]


async def _settings(parts: Parts) -> LookupSettings:
    return parts.settings


async def _index(parts: Parts) -> LookupIndex:
    return parts.index


async def _metrics(parts: Parts) -> LookupMetrics:
    return parts.metrics


async def _lookup(parts: Parts) -> LookupService:
    return parts.lookup


async def _events(parts: Parts) -> EventService:
    return parts.events


Settings = Annotated[LookupSettings, Depends(_settings)]
Index = Annotated[LookupIndex, Depends(_index)]
Metrics = Annotated[LookupMetrics, Depends(_metrics)]
Lookup = Annotated[LookupService, Depends(_lookup)]
Events = Annotated[EventService, Depends(_events)]
