"""Builds a service's app: its routers, and the parts that all services share."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.resources import files
from typing import Any, Final, Literal

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from lmcache_core.concurrency import TaskSupervisor, loop_pool
from lmcache_core.lookup.messages import JSON, MSGPACK
from lmcache_core.security import RateLimiter, Role, TlsFiles, TokenTable, server_context
from lmcache_core.telemetry.tracing import open_tracer
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    generate_latest,
)

from lmcache_servicekit.auth import GuardedRoute
from lmcache_servicekit.bodies import ApiModel
from lmcache_servicekit.health import HealthRegistry, HealthReport
from lmcache_servicekit.http_protocol import BoundedHttpProtocol
from lmcache_servicekit.listening import bind, naming_listener
from lmcache_servicekit.problems import (
    PROBLEM_RESPONSE,
    ProblemType,
    install_problem_handlers,
    problem_schemas,
)
from lmcache_servicekit.requests import BodyLimitMiddleware, RequestMiddleware
from lmcache_servicekit.settings import ServiceSettings
from lmcache_servicekit.state import ServiceState, service_state, version_of

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

TOKEN_RELOAD_INTERVAL_S: Final = 1.0
HEALTH_LOOK_S: Final = 3.0
PROBES_STOP_S: Final = 2
BUILD_INFO: Final = "lmcache_build_info"

_OTHER: Final = "default"


class ServiceApp(FastAPI):
    """A FastAPI app whose OpenAPI document tells the truth about errors, and about bodies that
    pydantic does not read. The id of an operation is the name of its function.

    Args:
        guarded: The routes that let callers in.
        only_tenant: The only tenant of this service; None: all tenants.
        options: FastAPI's own options.
    """

    def __init__(
        self,
        guarded: Sequence[GuardedRoute],
        only_tenant: str | None,
        **options: Any,
    ) -> None:
        super().__init__(
            generate_unique_id_function=lambda route: route.name,
            servers=[{"url": "/"}],
            **options,
        )
        self.guarded = tuple(guarded)
        self._only_tenant = only_tenant
        self._more_schemas: dict[str, Any] = {}

    def describe(self, schemas: Mapping[str, Any]) -> None:
        """Add schemas to the OpenAPI document, under the names that operations refer to."""
        self._more_schemas.update(schemas)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        schema = super().openapi()
        components = schema.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for replaced in ("HTTPValidationError", "ValidationError"):
            schemas.pop(replaced, None)
        schemas.update(problem_schemas() | self._more_schemas)
        examples = json.loads(files("lmcache_servicekit").joinpath("examples.json").read_bytes())
        for name in schemas.keys() & examples.keys():
            schemas[name]["examples"] = [examples[name]]
        components["responses"] = {"Problem": PROBLEM_RESPONSE}
        routes = {
            (route.path, method.lower()): route
            for route in self.guarded
            for method in route.methods or ()
        }
        for path, operations in schema.get("paths", {}).items():
            for method, operation in operations.items():
                _summarise(operation)
                if (route := routes.get((path, method))) is not None:
                    role = route.guard().role
                    self._add_problems(operation, role)
                    # OpenAPI has room for the role that a call needs.
                    operation["security"] = [
                        {name: [role] for name in scheme} for scheme in operation["security"]
                    ]
        return schema

    def _add_problems(self, operation: dict[str, Any], role: Role) -> None:
        """Document the statuses of the problems that an operation may answer with."""
        responses = operation["responses"]
        statuses = {status for status in responses if status.isdecimal() and int(status) >= 400}
        statuses |= {"401", "422", "429", _OTHER}
        if role == "admin" or self._only_tenant is not None:
            statuses.add("403")
        body = operation.get("requestBody", {}).get("content", {})
        if body:
            statuses |= {"408", "413"}
        if JSON in body:
            statuses |= {"400", "415"}
        if MSGPACK in responses.get("200", {}).get("content", {}):
            statuses.add("406")
        kept = {status: one for status, one in responses.items() if status not in statuses}
        problem = {"$ref": "#/components/responses/Problem"}
        operation["responses"] = kept | dict.fromkeys(sorted(statuses), problem)


def _summarise(operation: dict[str, Any]) -> None:
    """Replace a summary that FastAPI derived from a function's name with the description's first
    sentence.
    """
    text = " ".join(operation.get("description", "").split())
    if operation["summary"] == operation["operationId"].replace("_", " ").title() and text:
        first, _, rest = text.partition(". ")
        operation["summary"] = first.rstrip(".")
        operation["description"] = rest
        if not rest:
            del operation["description"]


def create_service_app(
    settings: ServiceSettings,
    distribution: str,
    *,
    lifespan: Lifespan,
    routers: Sequence[APIRouter],
    max_body_bytes: Mapping[str, int] | None = None,
    problems: Mapping[type[Exception], ProblemType] | None = None,
    page: APIRouter | None = None,
) -> ServiceApp:
    """Build a service's app. Reads token file and certificates; opens nothing else.

    Args:
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
        page: Answers `/`, with the same for every caller; None: the service's name, version and
            links.

    Raises:
        ConfigError: The token file or a certificate cannot be read.
        TypeError: A route admits any caller.
    """
    guarded: list[GuardedRoute] = []
    for route in (route for router in routers for route in router.routes):
        if not isinstance(route, GuardedRoute):
            raise TypeError(
                f"{route} admits every caller: create it with APIRouter(route_class=GuardedRoute)"
            )
        guarded.append(route)
    version = version_of(distribution)
    app = ServiceApp(
        guarded,
        settings.only_tenant,
        title=distribution,
        version=version,
        description=settings.about,
        lifespan=_with_own_parts(lifespan),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    tokens = (
        TokenTable.anonymous()
        if settings.auth_tokens_file is None
        else TokenTable.from_file(settings.auth_tokens_file, "auth_tokens_file")
    )
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Gauge(
        BUILD_INFO,
        "Constant 1, labelled with service and version.",
        ["service", "version"],
        registry=registry,
    ).labels(distribution, version).set(1)
    state = ServiceState(settings, tokens, HealthRegistry(), registry)
    if settings.tls_cert_file is not None:
        state.tls = server_context(
            TlsFiles.of(settings, "tls_cert_file", "tls_key_file", "tls_client_ca_file")
        )
    if settings.rate_limit_per_tenant is not None:
        state.limiter = RateLimiter(settings.rate_limit_per_tenant)
    app.state.service = state
    # The middleware added last is the outermost, so refused bodies are counted too.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=max_body_bytes or {})
    app.add_middleware(RequestMiddleware, state=state, service=distribution)
    install_problem_handlers(app, problems)
    pages = page or _index_router(
        Index(name=distribution, version=version, description=settings.about)
    )
    for router in (*routers, _probe_router(state), pages):
        app.include_router(router)
    return app


class Index(ApiModel):
    """The answer of `/`."""

    name: str
    """The service's command, for example `lmcache-lookup`."""
    version: str
    """Its release."""
    description: str
    """What the service is for."""
    openapi: str = "/openapi.json"
    """Path of this document."""
    liveness: str = "/healthz"
    """Path of the probe that says whether the process is alive."""
    readiness: str = "/readyz"
    """Path of the probe that says whether its dependencies answer."""
    metrics: str = "/metrics"
    """Path of the metrics for Prometheus."""


def _index_router(index: Index) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/")
    async def get_index() -> Index:
        """Name, version and where the rest is.

        The rest: this document, the probes and the metrics. Needs no token.
        """
        return index

    return router


class Liveness(ApiModel):
    """The answer of `/healthz`."""

    status: Literal["ok"] = "ok"
    """Always `ok`: a process that is not alive does not answer."""


def _probe_router(state: ServiceState) -> APIRouter:
    """Create the routes that need no credentials, since a kubelet has none."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def get_liveness() -> Liveness:
        """The process is alive.

        Asks no dependency: a restart would not help against a failed one. Needs no token.
        """
        return Liveness()

    @router.get(
        "/readyz",
        responses={503: {"model": HealthReport}},
    )
    async def get_readiness(response: Response) -> HealthReport:
        """Every dependency answers in time.

        Asks all dependencies at once, each within its own limit. 503 if a required one fails;
        with only optional ones failing 200 and `degraded`. Needs no token.
        """
        report = await state.health.run()
        if report.status == "unready":
            response.status_code = 503
        return report

    @router.get(
        "/metrics", response_class=Response, responses={200: {"description": "The metrics"}}
    )
    async def get_metrics() -> Response:
        """Prometheus metrics.

        In its text format. Needs no token.
        """
        return Response(generate_latest(state.registry), media_type=CONTENT_TYPE_LATEST)

    return router


class _QuietServer(uvicorn.Server):
    """Leaves signals to the main server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _probes(state: ServiceState, host: str, port: int) -> AsyncIterator[None]:
    """Serve `/healthz`, `/readyz` and `/metrics` alone, on a second listener.

    A kubelet or Prometheus may be unable to reach the service's own listener, or may lack a client
    certificate for it. This listener may use the pod's address, is never encrypted, and requires no
    credentials.

    Raises:
        ConfigError: The address is taken or belongs to another machine.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(_probe_router(state))
    with naming_listener("health_host", host, "health_port", port):
        listener = bind(host, port)
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
        asyncio.get_running_loop().set_default_executor(loop_pool())

        async def reload() -> None:
            await asyncio.to_thread(state.tokens.reload_if_changed)

        async def look() -> None:
            """Log dependencies that become unavailable or available again, even if no kubelet
            asks.
            """
            await asyncio.sleep(HEALTH_LOOK_S)
            await state.health.run()

        async with AsyncExitStack() as exits:
            tasks = TaskSupervisor("servicekit")
            exits.push_async_callback(tasks.close)
            if not state.tokens.is_anonymous:
                tasks.repeat("token-reload", reload, TOKEN_RELOAD_INTERVAL_S)
            if settings.health_port is not None:
                # Opened first, so that a kubelet sees a live process.
                await exits.enter_async_context(
                    _probes(state, settings.health_host, settings.health_port)
                )
            state.tracer = open_tracer(
                settings.otlp_endpoint, app.title, settings.instance_id, settings.trace_sample_ratio
            )
            if state.tracer is not None:
                exits.push_async_callback(asyncio.to_thread, state.tracer.close)
            await exits.enter_async_context(lifespan(app))
            looks = TaskSupervisor("health")
            # Ends first: dependencies that the lifespan closes are not unavailable.
            exits.push_async_callback(looks.close)
            looks.repeat("look", look, 0.0)
            yield

    return run
