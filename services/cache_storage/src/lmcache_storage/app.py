"""The storage's app."""

from __future__ import annotations

from fastapi import FastAPI
from lmcache_servicekit.app import BodyBounds, create_service_app
from lmcache_servicekit.log_level import create_log_router
from lmcache_servicekit.outgoing import check_outgoing

from lmcache_storage.admin.pin_routes import router as pin_router
from lmcache_storage.admin.routes import router as admin_router
from lmcache_storage.chunks.routes import router as chunks_router
from lmcache_storage.lifespan import lifespan
from lmcache_storage.problems import PROBLEMS
from lmcache_storage.settings import StorageSettings

RECORD_PATHS = "/v1/chunks/"


def create_app(settings: StorageSettings) -> FastAPI:
    """Build the app; its lifespan opens everything.

    Raises:
        ConfigError: A token file or a certificate cannot be read.
    """
    check_outgoing(settings, settings.service_token_file)
    return create_service_app(
        settings,
        "lmcache-storage",
        lifespan=lifespan,
        routers=[chunks_router, admin_router, pin_router, create_log_router()],
        bodies=BodyBounds(overrides={RECORD_PATHS: settings.max_record_bytes}),
        problems=PROBLEMS,
    )
