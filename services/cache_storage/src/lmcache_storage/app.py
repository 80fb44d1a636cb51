"""The storage's app."""

from __future__ import annotations

from fastapi import FastAPI
from lmcache_node.outgoing import check_outgoing
from lmcache_servicekit.app import BodyBounds, create_service_app
from lmcache_servicekit.log_level import create_log_router

from lmcache_storage.admin import admin, pins
from lmcache_storage.chunks import routes
from lmcache_storage.problems import PROBLEMS
from lmcache_storage.settings import StorageSettings
from lmcache_storage.storage import lifespan

RECORD_PATHS = "/v1/chunks/"


def create_app(settings: StorageSettings) -> FastAPI:
    """Build the app; its lifespan opens everything.

    Raises:
        ConfigError: A token file or a certificate cannot be read.
    """
    check_outgoing(settings)
    return create_service_app(
        settings,
        "lmcache-storage",
        lifespan=lifespan,
        routers=[routes.router, admin.router, pins.router, create_log_router()],
        bodies=BodyBounds(overrides={RECORD_PATHS: settings.max_record_bytes}),
        problems=PROBLEMS,
    )
