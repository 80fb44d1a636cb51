"""The sidecar's app."""

from __future__ import annotations

from fastapi import FastAPI
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.log_level import create_log_router

from lmcache_sidecar.admin import explain_routes, pin_routes, routes
from lmcache_sidecar.lifespan import lifespan
from lmcache_sidecar.settings import SidecarSettings


def create_app(settings: SidecarSettings) -> FastAPI:
    """Build the app; its lifespan opens everything.

    Raises:
        ConfigError: The token file cannot be read.
    """
    routers = [routes.router, pin_routes.router, explain_routes.router, create_log_router()]
    return create_service_app(settings, "lmcache-sidecar", lifespan=lifespan, routers=routers, only_tenant=settings.tenant)
