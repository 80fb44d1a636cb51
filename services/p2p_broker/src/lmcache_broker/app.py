"""The broker's app."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from lmcache_servicekit.app import BodyBounds, create_service_app
from lmcache_servicekit.log_level import create_log_router

from lmcache_broker.lifespan import create_lifespan
from lmcache_broker.overview.routes import router as overview_router
from lmcache_broker.page.routes import create_page_router
from lmcache_broker.peers.routes import router as peers_router
from lmcache_broker.settings import BrokerSettings, load_ticket_keys
from lmcache_broker.transfers.routes import router as transfers_router

# 4096 chunks with 16 holders of the longest names fit.
_BODIES: Final = BodyBounds(max_body_bytes=64 << 10, overrides={"/v1/transfers": 12 << 20})


def create_app(settings: BrokerSettings) -> FastAPI:
    """Build the app. Reads the token file and the key file.

    Raises:
        ConfigError: One of them cannot be read or is wrong.
    """
    lifespan = create_lifespan(settings, load_ticket_keys(settings))
    routers = [peers_router, transfers_router, overview_router, create_log_router()]
    app = create_service_app(
        settings, "lmcache-broker", lifespan=lifespan, routers=routers, bodies=_BODIES
    )
    app.include_router(
        create_page_router()
    )  # not among those that have to let callers in: its files are the same for everybody
    return app
