"""The metrics that all services have. A service's own metric names are constants in its own
`metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.types import Scope

from lmcache_servicekit.worker_metrics import WorkerMetrics

HTTP_REQUESTS_TOTAL: Final = "lmcache_http_requests_total"
HTTP_REQUEST_DURATION_SECONDS: Final = "lmcache_http_request_duration_seconds"
BUILD_INFO: Final = "lmcache_build_info"

UNMATCHED: Final = "unmatched"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def create_registry(service: str, version: str) -> CollectorRegistry:
    """Make a registry of one app's own, with the process's figures and which build this is."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Gauge(
        BUILD_INFO,
        "Constant 1, labelled with service and version.",
        ["service", "version"],
        registry=registry,
    )
    build.labels(service, version).set(1)
    return registry


def create_metrics_router(
    registry: CollectorRegistry, siblings: Callable[[], WorkerMetrics | None] = lambda: None
) -> APIRouter:
    """Make the route `/metrics`, in Prometheus' text format.

    Args:
        registry: What it shows.
        siblings: Gives the metrics of all workers of the port, where there are several.
    """
    router = APIRouter(tags=["health"])

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        workers = siblings()
        return Response(
            generate_latest(registry) if workers is None else await workers.gather(),
            media_type=CONTENT_TYPE_LATEST,
        )

    return router


class RequestMetrics:
    """Counts requests and how long they take. Labels are bounded: a route's template instead of a
    path, known methods only.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            HTTP_REQUESTS_TOTAL,
            "HTTP requests answered.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._duration = Histogram(
            HTTP_REQUEST_DURATION_SECONDS,
            "Seconds from request to end of answer.",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=registry,
        )

    def count(self, scope: Scope, status: int, elapsed_s: float) -> None:
        """Count a request that was answered, or has failed."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        path = getattr(scope.get("route"), "path", None)
        route = path if isinstance(path, str) else UNMATCHED
        self._requests.labels(method, route, str(status)).inc()
        self._duration.labels(method, route).observe(elapsed_s)
