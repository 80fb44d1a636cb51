"""The sidecar's app."""

from __future__ import annotations

from fastapi import FastAPI
from lmcache_core.security import TicketKeyFile
from lmcache_node.node import check_outgoing
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.logs import create_log_router
from lmcache_servicekit.settings import read_secret_file

from lmcache_sidecar.admin import explain, pins, status
from lmcache_sidecar.settings import SidecarSettings
from lmcache_sidecar.sidecar import lifespan


def create_app(settings: SidecarSettings) -> FastAPI:
    """Build the app; its lifespan opens everything.

    Raises:
        ConfigError: A file with a token, a key or a certificate cannot be read.
    """
    check_outgoing(settings)
    read_secret_file(settings.salt_file, "salt_file")
    if settings.ticket_keys_file is not None:
        TicketKeyFile(settings.ticket_keys_file, "ticket_keys_file")
    routers = [status.router, pins.router, explain.router, create_log_router()]
    return create_service_app(settings, "lmcache-sidecar", lifespan=lifespan, routers=routers)
