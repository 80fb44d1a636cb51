"""The service's REST interface. Its messages are those of `lmcache_core.lookup.messages`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from lmcache_core.lookup.messages import (
    JSON,
    MAX_INCARNATION,
    MAX_TENANTS_PER_ANSWER,
    ChunksRequest,
    ContainsAnswer,
    EventsAck,
    EventsRequest,
    EvictedAnswer,
    EvictRequest,
    InstanceLease,
    InstancesAnswer,
    LeaseRequest,
    LocationsAnswer,
    LookupAnswer,
    PackedChunksRequest,
    PackedEventsRequest,
    PackedEvictRequest,
    PackedLookupAnswer,
    RouteAnswer,
    StatsAnswer,
    TenantsAnswer,
)
from lmcache_core.names import INSTANCE_PATTERN, TENANT_PATTERN
from lmcache_servicekit.auth import (
    AdminPrincipal,
    ClientPrincipal,
    GuardedRoute,
    refuse_unknown_parameters,
)
from lmcache_servicekit.bodies import (
    BodyTypes,
    RequestBody,
    answered,
    packed_answer,
    wants_packed,
)
from lmcache_servicekit.problems import failures

from lmcache_lookup.index import LeaseClaim
from lmcache_lookup.service import LookupService, tenant_for

CHUNKS: Final = RequestBody(ChunksRequest, PackedChunksRequest)
LEASE: Final = RequestBody(LeaseRequest, LeaseRequest)
EVENTS: Final = RequestBody(EventsRequest, PackedEventsRequest)
EVICT: Final = RequestBody(EvictRequest, PackedEvictRequest)

bodies: Final = BodyTypes()


async def _service(request: Request) -> LookupService:
    # A coroutine: FastAPI runs plain functions in a thread, which would cost more than the rest of
    # a call.
    service = request.app.state.lookup
    assert isinstance(service, LookupService)
    return service


Service = Annotated[LookupService, Depends(_service)]
ChunkIdInPath = Annotated[
    str, Path(pattern=r"^[0-9a-f]{32}$", description="A chunk id: 32 hex digits.")
]
InstanceInPath = Annotated[
    str, Path(pattern=f"^{INSTANCE_PATTERN}$", max_length=128, description="The instance's id.")
]
IncarnationInQuery = Annotated[
    int,
    Query(ge=0, le=MAX_INCARNATION, description="Only this life of the instance; else any."),
]
TenantInQuery = Annotated[
    str,
    Query(
        pattern=f"^{TENANT_PATTERN}$",
        max_length=63,
        description="The tenant; by default the caller's.",
    ),
]
TenantBefore = Annotated[
    str,
    Query(
        pattern=f"^{TENANT_PATTERN}$",
        max_length=63,
        description="Names after this one: the last one of the page before.",
    ),
]
Limit = Annotated[
    int, Query(ge=1, le=MAX_TENANTS_PER_ANSWER, description="Largest number of names.")
]


class DirectRoute(GuardedRoute):
    """Passes `request`, `caller` and `service` to its endpoint, which may take nothing else.

    FastAPI resolves these parameters, too, and documents them as usual, but that takes longer than
    all other HTTP processing of a lookup.

    Raises:
        TypeError: The route has further parameters or dependencies, which would not be resolved.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        parameters = set(inspect.signature(endpoint).parameters)
        # FastAPI sees two dependencies: those of `caller` and `service`.
        if parameters != {"request", "caller", "service"} or len(self.dependant.dependencies) != 2:
            rule = "must take request, caller and service, and have no further dependencies"
            raise TypeError(f"{path}: a DirectRoute {rule}; make it a GuardedRoute")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        guard = self.guard()
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint

        async def handle(request: Request) -> Response:
            caller = await guard.admit(request)
            refuse_unknown_parameters(request)
            service = await _service(request)
            return await endpoint(request=request, caller=caller, service=service)

        return handle


questions = APIRouter(prefix="/v1", tags=["lookup"], route_class=DirectRoute)
lookup_router = APIRouter(prefix="/v1", tags=["lookup"], route_class=GuardedRoute)
instances_router = APIRouter(prefix="/v1", tags=["instances"], route_class=GuardedRoute)
events_router = APIRouter(prefix="/v1", tags=["events"], route_class=GuardedRoute)
admin_router = APIRouter(prefix="/v1", tags=["admin"], route_class=GuardedRoute)
ROUTERS: Final = (questions, lookup_router, instances_router, events_router, admin_router)


@questions.post(
    "/lookup",
    summary="Find the longest cached prefix and its holders",
    **bodies.route(CHUNKS, LookupAnswer, PackedLookupAnswer),
)
async def lookup_prefix(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """Up to 8192 chunks; without the index the answer is empty and `degraded`."""
    packed = wants_packed(request)
    body = await CHUNKS.read(request)
    answer = await service.lookup(caller.tenant, body.ids, body.exclude)
    return packed_answer(answer) if packed else Response(plain_json(answer), media_type=JSON)


@questions.post(
    "/route",
    summary="Show the longest prefix of each instance",
    **bodies.route(CHUNKS, RouteAnswer),
)
async def lookup_prefixes(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """For request routers."""
    body = await CHUNKS.read(request)
    return answered(request, await service.route(caller.tenant, body.ids, body.exclude))


@questions.post(
    "/contains", summary="Check which chunks have a holder", **bodies.route(CHUNKS, ContainsAnswer)
)
async def contains_chunks(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """Each chunk on its own, not as a prefix."""
    body = await CHUNKS.read(request)
    return answered(request, await service.contains(caller.tenant, body.ids, body.exclude))


@lookup_router.get(
    "/chunks/{chunk_id}/locations",
    summary="List a chunk's holders",
    **bodies.route(answer=LocationsAnswer),
)
async def list_locations(
    request: Request, chunk_id: ChunkIdInPath, caller: ClientPrincipal, service: Service
) -> Response:
    """Empty if none is known."""
    return answered(request, await service.locations(caller.tenant, bytes.fromhex(chunk_id)))


@instances_router.put(
    "/instances/{instance}",
    summary="Take or renew a lease",
    **bodies.route(LEASE, InstanceLease, failing=(503, 507)),
)
async def renew_lease(
    request: Request, instance: InstanceInPath, caller: ClientPrincipal, service: Service
) -> Response:
    """The instance's chunks are found until the lease ends."""
    body = await LEASE.read(request)
    ttl_ms = service.settings.granted_ttl_ms(body.ttl_ms)
    state = await service.index.renew(
        caller.tenant, LeaseClaim(instance, body.incarnation, body.kind, ttl_ms)
    )
    service.metrics.resyncs.inc(state.resync)
    return answered(request, InstanceLease(ttl_ms, state.next_sequence, state.resync))


@instances_router.delete(
    "/instances/{instance}", summary="End a lease", status_code=204, responses=failures(503)
)
async def end_lease(
    instance: InstanceInPath,
    caller: ClientPrincipal,
    service: Service,
    incarnation: IncarnationInQuery | None = None,
) -> None:
    """Idempotent. With `incarnation`, the lease of a later incarnation stays."""
    await service.index.end(caller.tenant, instance, incarnation)


@instances_router.get(
    "/instances",
    summary="List live leases",
    **bodies.route(answer=InstancesAnswer, failing=(503,)),
)
async def list_instances(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """Those of the caller's tenant."""
    return answered(request, InstancesAnswer(await service.index.instances(caller.tenant)))


@events_router.post(
    "/events",
    summary="Report stores and removals",
    **bodies.route(EVENTS, EventsAck, failing=(403, 503)),
)
async def report_events(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """A repeated batch is skipped; a gap requests a resync."""
    return answered(request, await service.take(caller, await EVENTS.read(request)))


@lookup_router.get(
    "/stats",
    summary="Show figures of the index",
    **bodies.route(answer=StatsAnswer, failing=(403,)),
)
async def get_stats(
    request: Request, caller: ClientPrincipal, service: Service, tenant: TenantInQuery | None = None
) -> Response:
    """Of the caller's tenant, or the one an admin names."""
    return answered(request, await service.stats(tenant_for(caller, tenant)))


@admin_router.get(
    "/admin/tenants",
    summary="List tenants with chunks",
    **bodies.route(answer=TenantsAnswer, failing=(503,)),
)
async def list_tenants(
    request: Request,
    caller: AdminPrincipal,
    service: Service,
    after: TenantBefore | None = None,
    limit: Limit = MAX_TENANTS_PER_ANSWER,
) -> Response:
    """A page of names after `after`."""
    found = [tenant for tenant in await service.index.tenants() if tenant > (after or "")]
    page = found[:limit]
    return answered(request, TenantsAnswer(page, page[-1] if len(found) > limit else None))


@admin_router.post(
    "/admin/evict",
    summary="Remove holders of chunks",
    **bodies.route(EVICT, EvictedAnswer, failing=(503,)),
)
async def evict_chunks(request: Request, caller: AdminPrincipal, service: Service) -> Response:
    """The instances keep the chunks and may announce them again."""
    body = await EVICT.read(request)
    return answered(
        request, EvictedAnswer(await service.index.evict(tenant_for(caller, body.tenant), body.ids))
    )


@admin_router.post(
    "/admin/clear", summary="Clear a tenant's index", status_code=204, responses=failures(503)
)
async def clear_tenant(
    caller: AdminPrincipal, service: Service, tenant: TenantInQuery | None = None
) -> None:
    """Its instances then announce all chunks again."""
    await service.index.clear(tenant_for(caller, tenant))


class _Encoded(msgspec.Struct):
    """`LookupAnswer` with lists of holders that are already encoded."""

    num_prefix: int
    holders: list[msgspec.Raw]
    degraded: bool


def plain_json(answer: PackedLookupAnswer) -> bytes:
    """Return the JSON of a `LookupAnswer`."""
    holders: list[msgspec.Raw] = []
    for run in answer.runs:
        holders += [msgspec.Raw(msgspec.json.encode(run.unpack()))] * run.num_chunks
    return msgspec.json.encode(_Encoded(answer.num_prefix, holders, answer.degraded))
