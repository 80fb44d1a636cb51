"""The app factory and the command `lmcache-lookup`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from fastapi import FastAPI
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.logs import create_log_router
from lmcache_servicekit.runner import run_service
from lmcache_servicekit.state import service_state

from lmcache_lookup.index import LookupIndex, create_index
from lmcache_lookup.metrics import LookupMetrics
from lmcache_lookup.routes import ROUTERS, bodies
from lmcache_lookup.service import LookupService
from lmcache_lookup.settings import LookupSettings

logger = logging.getLogger(__name__)

NAME = "lmcache-lookup"

# 8192 chunk ids, or 2048 events, with room to spare.
MAX_BODY_BYTES: Final = 1 << 20


def create_app(settings: LookupSettings, index: LookupIndex | None = None) -> FastAPI:
    """Build the app.

    Args:
        index: Use this index instead of the one in the settings.

    Raises:
        ConfigError: The token file or the Redis URL cannot be read.
    """
    app = create_service_app(
        settings,
        NAME,
        lifespan=_lifespan_of(settings, index or create_index(settings)),
        routers=[*ROUTERS, create_log_router()],
        max_body_bytes={"": MAX_BODY_BYTES},
    )
    app.describe(bodies.schemas())
    return app


def _lifespan_of(
    settings: LookupSettings, index: LookupIndex
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the lifespan of an app over `index`, which it opens and closes. The service starts
    even if the index is unavailable.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = service_state(app)
        metrics = LookupMetrics(state.registry)
        app.state.lookup = LookupService(index, metrics, settings)

        async def probe() -> str:
            await index.ping()
            return index.name

        async def sweep() -> None:
            try:
                metrics.swept_entries.inc(await index.sweep())
            except UnavailableError as exc:
                logger.debug("sweep skipped: error=%s", exc)

        # Without the index the answers are `degraded`, which is faster for callers than no service.
        timeout_s = settings.redis_write_timeout_ms / 1000
        state.health.add("index", probe, timeout_s=timeout_s, required=False, where=index.where)
        supervisor = TaskSupervisor("lookup")
        await index.open()
        try:
            supervisor.repeat("sweep", sweep, settings.sweep_interval_s)
            yield
        finally:
            await supervisor.close()
            await index.close()

    return lifespan


def main() -> int:
    """Run the service."""
    return run_service(NAME, LookupSettings, create_app)
