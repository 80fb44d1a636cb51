"""The app factory and the command `lmcache-lookup`."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from lmcache_core.lookup import (
    ContainsAnswer,
    EventsAck,
    InstanceLease,
    LocationsAnswer,
    LookupAnswer,
    RouteAnswer,
)
from lmcache_core.lookup.runs import PackedLookupAnswer
from lmcache_servicekit.app import BodyBounds, create_service_app
from lmcache_servicekit.log_level import create_log_router
from lmcache_servicekit.runner import run_service

from lmcache_lookup.admin.routes import router as admin_router
from lmcache_lookup.admin.schemas import EVICT, EvictedAnswer, StatsAnswer, TenantsAnswer
from lmcache_lookup.events.routes import router as events_router
from lmcache_lookup.events.schemas import EVENTS
from lmcache_lookup.index import LookupIndex, create_index
from lmcache_lookup.instances.routes import router as instances_router
from lmcache_lookup.instances.schemas import LEASE, InstancesAnswer
from lmcache_lookup.lifespan import lifespan_of
from lmcache_lookup.lookup.routes import questions
from lmcache_lookup.lookup.routes import router as lookup_router
from lmcache_lookup.lookup.schemas import CHUNKS
from lmcache_lookup.openapi import schemas_of
from lmcache_lookup.settings import LookupSettings

NAME = "lmcache-lookup"

# 8192 chunk ids, or 2048 events, with room to spare.
MAX_BODY_BYTES: Final = 1 << 20

_QUESTIONS: Final = tuple(
    kind for body in (CHUNKS, LEASE, EVENTS, EVICT) for kind in (body.plain, body.packed)
)
_ANSWERS: Final = (
    *(LookupAnswer, PackedLookupAnswer, RouteAnswer, ContainsAnswer, LocationsAnswer),
    *(InstanceLease, InstancesAnswer, EventsAck, StatsAnswer, TenantsAnswer, EvictedAnswer),
)
BODIES: Final = (*_QUESTIONS, *_ANSWERS)
"""Everything that the service reads and writes, as the OpenAPI document names it."""


def create_app(settings: LookupSettings, index: LookupIndex | None = None) -> FastAPI:
    """Build the app.

    Args:
        settings: Options.
        index: Instead of the one that the settings ask for.

    Raises:
        ConfigError: The token file or the Redis URL cannot be read.
    """
    app = create_service_app(
        settings,
        NAME,
        lifespan=lifespan_of(settings, index or create_index(settings)),
        routers=[
            questions,
            lookup_router,
            instances_router,
            events_router,
            admin_router,
            create_log_router(),
        ],
        bodies=BodyBounds(MAX_BODY_BYTES),
    )
    app.describe(schemas_of(*BODIES))
    return app


def main() -> int:
    """Run the service."""
    return run_service(NAME, LookupSettings, create_app, workers=lambda settings: settings.workers)
