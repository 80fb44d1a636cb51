"""The typed state that `create_service_app` puts into an app, and the version of the build."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from lmcache_core.security import RateLimiter, TokenTable
from lmcache_core.telemetry.tracing import Tracer
from prometheus_client import CollectorRegistry

from lmcache_servicekit.errors import ThrottledError
from lmcache_servicekit.health import HealthRegistry
from lmcache_servicekit.settings import ServiceSettings


@dataclass(slots=True)
class ServiceState:
    """The shared parts of one running app. A service's own parts are also in `app.state`.

    Attributes:
        tokens: Accepted tokens; re-read when the file changes.
        health: The checks of `/readyz`; a lifespan adds its own.
        ports: Ports other than HTTP that a lifespan opened, by name; written to the port file.
        tls: Encryption of REST and lm://; None: none.
        limiter: Rate limit of each tenant; None: none.
        tracer: Traces requests while the app runs; None: no tracing.
        before_stop: Awaited one after the other on SIGTERM, while requests are still answered; each
            bounds its own time and must not fail.
    """

    settings: ServiceSettings
    tokens: TokenTable
    health: HealthRegistry
    registry: CollectorRegistry
    ports: dict[str, int] = field(default_factory=dict)
    before_stop: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    tls: ssl.SSLContext | None = None
    limiter: RateLimiter | None = None
    tracer: Tracer | None = None

    def admit(self, tenant: str) -> None:
        """Count one request of a tenant.

        Raises:
            ThrottledError: It exceeds the tenant's rate.
        """
        wait_s = 0.0 if self.limiter is None else self.limiter.wait_s(tenant)
        if wait_s > 0:
            raise ThrottledError("this tenant exceeds rate_limit_per_tenant", wait_s)


def service_state(app: FastAPI) -> ServiceState:
    """Return the shared parts of `app`, created by `create_service_app`."""
    state: Any = app.state.service
    assert isinstance(state, ServiceState)
    return state


def version_of(distribution: str) -> str:
    """Return a distribution's version, `unknown` if it runs from a bare source tree."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
