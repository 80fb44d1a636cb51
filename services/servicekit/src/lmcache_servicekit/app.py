"""Builds a service's app: its routers between the parts that all services share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final, Literal

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError
from lmcache_core.security import RateLimiter, TlsFiles, TokenTable, server_context
from lmcache_core.telemetry.tracing import open_tracer
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from pydantic import BaseModel

from lmcache_servicekit.auth import GuardedRoute
from lmcache_servicekit.health import HealthRegistry, HealthReport
from lmcache_servicekit.http_protocol import BoundedHttpProtocol
from lmcache_servicekit.listening import bind
from lmcache_servicekit.problems import MEDIA_TYPE, ProblemType, install_problem_handlers
from lmcache_servicekit.requests import BodyLimitMiddleware, RequestMiddleware
from lmcache_servicekit.settings import ServiceSettings
from lmcache_servicekit.state import ServiceState, service_state, version_of

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

TOKEN_RELOAD_INTERVAL_S: Final = 1.0
HEALTH_LOOK_S: Final = 3.0
PROBES_STOP_S: Final = 2
BUILD_INFO: Final = "lmcache_build_info"

_PROBLEM_SCHEMA: Final = {
    "title": "Problem",
    "description": "RFC 9457 problem details.",
    "type": "object",
    "required": ["type", "title", "status"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "request_id": {
            "type": "string",
            "description": "The request's `X-Request-Id`, also in log lines.",
        },
    },
}
_PROBLEM_RESPONSE: Final = {
    "description": "What went wrong (RFC 9457)",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


class ServiceApp(FastAPI):
    """A FastAPI app whose OpenAPI document tells the truth about errors, and about bodies that
    pydantic does not read.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._more_schemas: dict[str, Any] = {}

    def describe(self, schemas: Mapping[str, Any]) -> None:
        """Add schemas to the OpenAPI document, by the names that operations refer to them by."""
        self._more_schemas.update(schemas)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. Every operation under `/v1`, and every one that reads a
        body, may answer with a problem.
        """
        schema = super().openapi()
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for replaced in ("HTTPValidationError", "ValidationError"):
            schemas.pop(replaced, None)
        schemas["Problem"] = _PROBLEM_SCHEMA
        schemas.update(self._more_schemas)
        for path, operations in schema.get("paths", {}).items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if path.startswith("/v1") or "requestBody" in operation:
                    operation["responses"]["default"] = _PROBLEM_RESPONSE
        return schema


def create_service_app(
    settings: ServiceSettings,
    distribution: str,
    *,
    lifespan: Lifespan,
    routers: Sequence[APIRouter],
    max_body_bytes: Mapping[str, int] | None = None,
    problems: Mapping[type[Exception], ProblemType] | None = None,
    only_tenant: str | None = None,
) -> ServiceApp:
    """Build a service's app. Reads token file and certificates; opens nothing else.

    Args:
        settings: The service's settings.
        distribution: Name of the installed distribution, which is also the command, for example
            `lmcache-lookup`.
        lifespan: Opens and closes the service's own parts; `service_state(app)` is there when it is
            entered.
        routers: The service's routes, each a `GuardedRoute`, with full paths:
            `APIRouter(prefix="/v1", route_class=GuardedRoute)`, since a prefix that is given to
            `include_router` does not reach the metrics' route label.
        max_body_bytes: Largest request body by path prefix; the longest prefix counts, and `""` is
            4 MiB unless it is given.
        problems: Entries for the service's own errors.
        only_tenant: Whose service this is; None: all tenants'.

    Raises:
        ConfigError: The token file or a certificate cannot be read.
        TypeError: A route lets in any caller.
    """
    for route in (route for router in routers for route in router.routes):
        if not isinstance(route, GuardedRoute):
            raise TypeError(
                f"{route} lets every caller in: make it by APIRouter(route_class=GuardedRoute)"
            )
    version = version_of(distribution)
    app = ServiceApp(
        title=distribution,
        version=version,
        lifespan=_with_own_parts(lifespan),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    tokens = (
        TokenTable.anonymous()
        if settings.auth_tokens_file is None
        else TokenTable.from_file(settings.auth_tokens_file)
    )
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Gauge(
        BUILD_INFO,
        "Constant 1, labelled with service and version.",
        ["service", "version"],
        registry=registry,
    ).labels(distribution, version).set(1)
    state = ServiceState(settings, tokens, HealthRegistry(), registry, only_tenant=only_tenant)
    if settings.tls_cert_file is not None:
        state.tls = server_context(
            TlsFiles(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
        )
    if settings.rate_limit_per_tenant is not None:
        state.limiter = RateLimiter(settings.rate_limit_per_tenant)
    app.state.service = state
    # The one added last is the outermost: refused bodies are counted too.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=max_body_bytes or {})
    app.add_middleware(RequestMiddleware, state=state, service=distribution)
    install_problem_handlers(app, problems)
    for router in (*routers, _probe_router(state)):
        app.include_router(router)
    return app


class Liveness(BaseModel):
    """The answer of `/healthz`."""

    status: Literal["ok"] = "ok"


def _probe_router(state: ServiceState) -> APIRouter:
    """Make the routes that need no credentials: a kubelet has none."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="The process is alive")
    async def healthz() -> Liveness:
        return Liveness()

    @router.get(
        "/readyz",
        summary="Every dependency answers in time",
        responses={503: {"model": HealthReport}},
    )
    async def readyz(response: Response) -> HealthReport:
        report = await state.health.run()
        if report.status == "unready":
            response.status_code = 503
        return report

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        text = (
            generate_latest(state.registry)
            if state.siblings is None
            else await state.siblings.gather()
        )
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


class _QuietServer(uvicorn.Server):
    """Leaves signals to the main server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _probes(state: ServiceState, host: str, port: int) -> AsyncIterator[None]:
    """Serve `/healthz`, `/readyz` and `/metrics` alone, on a second listener.

    A kubelet or Prometheus may not reach what a service listens on, or may have no certificate to
    show there; this listener may stand on the pod's address, is never encrypted, and asks for
    nothing.

    Raises:
        ConfigError: The address is taken or not this machine's.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(_probe_router(state))
    try:
        # Any of several workers may answer.
        listener = bind(host, port, shared=state.siblings is not None)
    except OSError as exc:
        raise ConfigError(
            f"health_host={host!r}, health_port={port}: {exc.strerror or exc}"
        ) from exc
    state.ports["health_port"] = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=PROBES_STOP_S,
    )
    server = _QuietServer(config)
    tasks = TaskSupervisor("probe-server", max_tasks=1)
    tasks.start("serve", server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await tasks.close(drain_s=PROBES_STOP_S + 1)


def _with_own_parts(lifespan: Lifespan) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        state = service_state(app)
        settings = state.settings

        async def reload() -> None:
            await asyncio.to_thread(state.tokens.reload_if_changed)

        async def look() -> None:
            """Log what is away, and back, also where no kubelet asks."""
            await asyncio.sleep(HEALTH_LOOK_S)
            await state.health.run()

        async with AsyncExitStack() as exits:
            tasks = TaskSupervisor("servicekit")
            exits.push_async_callback(tasks.close)
            if not state.tokens.is_anonymous:
                tasks.repeat("token-reload", reload, TOKEN_RELOAD_INTERVAL_S)
            if settings.health_port is not None:
                # Before the rest is opened, so that a kubelet sees a living process.
                await exits.enter_async_context(
                    _probes(state, settings.health_host, settings.health_port)
                )
            state.tracer = open_tracer(
                settings.otlp_endpoint, app.title, settings.instance_id, settings.trace_sample_ratio
            )
            if state.tracer is not None:
                exits.push_async_callback(asyncio.to_thread, state.tracer.close)
            await exits.enter_async_context(lifespan(app))
            if state.siblings is not None:
                await state.siblings.open()
                exits.push_async_callback(state.siblings.close)
            looks = TaskSupervisor("health")
            # Ends first: what the lifespan closes is not away.
            exits.push_async_callback(looks.close)
            looks.repeat("look", look, 0.0)
            yield

    return run
