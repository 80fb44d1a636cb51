"""A second listener for `/healthz`, `/readyz` and `/metrics` alone.

A kubelet or Prometheus may not reach what a service listens on, or may have no certificate to show
there; this listener may stand on the pod's address, is never encrypted, and asks for nothing.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError

from lmcache_servicekit.health import create_health_router
from lmcache_servicekit.http_protocol import BoundedHttpProtocol
from lmcache_servicekit.metrics import create_metrics_router
from lmcache_servicekit.state import ServiceState

STOP_S = 2


class _QuietServer(uvicorn.Server):
    """Leaves signals to the main server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class ProbeServer:
    """Serves probes and metrics.

    Args:
        state: Whose checks and metrics.
        host: Where to listen.
        port: 0 takes a free one.
    """

    def __init__(self, state: ServiceState, host: str, port: int) -> None:
        self._state = state
        self._host = host
        self._wanted_port = port
        self._tasks = TaskSupervisor("probe-server", max_tasks=1)
        self._server: uvicorn.Server | None = None
        self.port = 0

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: The address is taken or not this machine's.
        """
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.include_router(create_health_router(self._state.health))
        app.include_router(
            create_metrics_router(self._state.registry, lambda: self._state.siblings)
        )
        listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._state.siblings is not None:
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEPORT, 1
            )  # any of the workers may answer
        try:
            listener.bind((self._host, self._wanted_port))
        except OSError as exc:
            listener.close()
            raise ConfigError(
                f"health_host={self._host!r}, health_port={self._wanted_port}:"
                f" {exc.strerror or exc}"
            ) from exc
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = _QuietServer(config)
        self._tasks.start("serve", self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        await self._tasks.close(drain_s=STOP_S + 1)
