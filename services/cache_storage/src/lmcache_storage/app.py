"""The storage's app, and the command `lmcache-storage`."""

from __future__ import annotations

import ctypes
from typing import Final

from fastapi import FastAPI
from lmcache_node.node import check_outgoing
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.logs import create_log_router
from lmcache_servicekit.runner import run_service

from lmcache_storage import admin, chunks
from lmcache_storage.problems import PROBLEMS
from lmcache_storage.settings import StorageSettings
from lmcache_storage.storage import lifespan

RECORD_PATHS: Final = "/v1/chunks/"
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Source: mallopt(3), malloc.h of glibc."""
KEPT_BYTES: Final = 16 << 20
LARGEST_KEPT_BYTES: Final = 1 << 20


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
        routers=[chunks.router, admin.router, create_log_router()],
        max_body_bytes={RECORD_PATHS: settings.max_record_bytes},
        problems=PROBLEMS,
    )


def keep_freed_memory() -> bool:
    """Let this process keep some of the memory that it frees, for reuse.

    Bodies come and go in pieces of some 100 KiB. By default the C library gives each back to the
    system, which then clears a page at a time for the next: more than half of the processor time of
    storing 32 MiB over REST.

    Returns:
        Whether the C library supports this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    )


def main() -> int:
    """Run the storage until SIGTERM."""
    keep_freed_memory()
    return run_service("lmcache-storage", StorageSettings, create_app)
