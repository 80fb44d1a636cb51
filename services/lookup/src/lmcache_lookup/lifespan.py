"""Opens and closes the parts of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from lmcache_core.concurrency import TaskSupervisor
from lmcache_servicekit.state import service_state

from lmcache_lookup.dependencies import LookupParts, set_parts
from lmcache_lookup.events.service import EventService
from lmcache_lookup.index import LookupIndex
from lmcache_lookup.lookup.service import LookupService
from lmcache_lookup.metrics import LookupMetrics
from lmcache_lookup.settings import LookupSettings
from lmcache_lookup.upkeep import sweep_once


def lifespan_of(
    settings: LookupSettings, index: LookupIndex
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """The lifespan of an app over `index`, which it opens and closes. An index that is away does
    not stop the service from starting.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = service_state(app)
        metrics = LookupMetrics(state.registry)
        set_parts(
            app,
            LookupParts(
                settings,
                index,
                metrics,
                LookupService(index, metrics),
                EventService(index, metrics),
            ),
        )

        async def probe() -> str:
            await index.ping()
            return index.name

        # Without the index the answers are `degraded`, which is quicker for callers than no service
        # at all.
        timeout_s = settings.redis_write_timeout_ms / 1000
        state.health.add("index", probe, timeout_s=timeout_s, required=False, where=index.where)
        supervisor = TaskSupervisor("lookup")
        await index.open()
        try:
            supervisor.repeat(
                "sweep", lambda: sweep_once(index, metrics), settings.sweep_interval_s
            )
            yield
        finally:
            await supervisor.close()
            await index.close()

    return lifespan
