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
    PackedLookupAnswer,
    RouteAnswer,
    StatsAnswer,
    TenantsAnswer,
)
from lmcache_core.names import INSTANCE_PATTERN, TENANT_PATTERN
from lmcache_core.security import SHARED_OWNER, owner_of, speaks_for_all_tenants
from lmcache_servicekit.auth import (
    AdminPrincipal,
    ClientPrincipal,
    GuardedRoute,
    refuse_unknown_parameters,
    require_role_for,
)
from lmcache_servicekit.bodies import (
    BodyTypes,
    RequestBody,
    answered,
    json_answer,
    packed_answer,
    wants_packed,
)
from lmcache_servicekit.problems import failures

from lmcache_lookup.index import LeaseClaim
from lmcache_lookup.service import LookupService, tenant_for

CHUNKS: Final = RequestBody[ChunksRequest | PackedChunksRequest](ChunksRequest, PackedChunksRequest)
LEASE: Final = RequestBody(LeaseRequest)
EVENTS: Final = RequestBody(packed=EventsRequest)
EVICT: Final = RequestBody(EvictRequest)

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
    int | None,
    Query(
        ge=0,
        le=MAX_INCARNATION,
        description="End the lease only if it is of this incarnation; if absent, of any.",
    ),
]
TenantInQuery = Annotated[
    str | None,
    Query(
        pattern=f"^{TENANT_PATTERN}$",
        max_length=63,
        description="The tenant; if absent, the caller's. Another one needs the role `admin`.",
    ),
]
TenantBefore = Annotated[
    str | None,
    Query(
        pattern=f"^{TENANT_PATTERN}$",
        max_length=63,
        description="Only names after this one: the page before ends with it.",
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
    **bodies.route(CHUNKS, LookupAnswer, PackedLookupAnswer),
)
async def lookup_prefix(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """Find the longest cached prefix and its holders.

    Of the caller's tenant. The prefix ends at the first chunk that no instance outside `exclude`
    holds; up to 16 holders are named for each chunk. A holder may have evicted it since. If the
    index does not answer in time, the answer is empty and `degraded`, not an error.
    """
    packed = wants_packed(request)
    body = await CHUNKS.read(request)
    answer = await service.lookup(caller.tenant, body.ids, body.exclude)
    return packed_answer(answer) if packed else Response(plain_json(answer), media_type=JSON)


@questions.post(
    "/route",
    **bodies.route(CHUNKS, RouteAnswer, RouteAnswer),
)
async def lookup_prefixes(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """Show the longest prefix of each instance.

    For request routers: how many of the chunks, from the first, each instance has by itself.
    Instances without the first chunk are omitted. Of the caller's tenant; `degraded` as in a
    lookup.
    """
    body = await CHUNKS.read(request)
    return answered(request, await service.route(caller.tenant, body.ids, body.exclude))


@questions.post("/contains", **bodies.route(CHUNKS, ContainsAnswer, ContainsAnswer))
async def contains_chunks(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """Check which chunks have a holder.

    Each chunk on its own, not as a prefix. Of the caller's tenant; if the index does not answer
    in time, no chunk is present and the answer is `degraded`.
    """
    body = await CHUNKS.read(request)
    return answered(request, await service.contains(caller.tenant, body.ids, body.exclude))


@lookup_router.get(
    "/chunks/{chunk_id}/locations",
    **bodies.route(answer=LocationsAnswer),
)
async def list_locations(
    chunk_id: ChunkIdInPath, caller: ClientPrincipal, service: Service
) -> Response:
    """List a chunk's holders.

    One for each tier of each live instance that has it. Of the caller's tenant; `degraded` if the
    index does not answer in time.
    """
    return json_answer(await service.locations(caller.tenant, bytes.fromhex(chunk_id)))


@instances_router.put(
    "/instances/{instance}",
    **bodies.route(LEASE, InstanceLease, failing=(403, 503, 507)),
)
async def renew_lease(
    request: Request, instance: InstanceInPath, caller: ClientPrincipal, service: Service
) -> Response:
    """Take or renew a lease.

    The instance's chunks are found until the lease ends. The lease belongs to the caller's
    tenant; those of the roles `storage` and `admin` belong to no tenant. A higher incarnation voids
    what earlier ones reported, and begins with event 0; a lower one than the live lease's changes
    nothing and must resync. 403: the role does not allow this kind. 507: too many instances have
    leases. 503: the index did not answer in time; repeat the call.
    """
    body = await LEASE.read(request)
    require_role_for(caller, body.kind)
    ttl_ms = service.settings.granted_ttl_ms(body.ttl_ms)
    state = await service.index.renew(
        owner_of(caller), LeaseClaim(instance, body.incarnation, body.kind, ttl_ms)
    )
    service.metrics.resyncs.inc(state.resync)
    return json_answer(InstanceLease(ttl_ms, state.next_sequence, state.resync))


@instances_router.delete("/instances/{instance}", status_code=204, responses=failures(503))
async def end_lease(
    instance: InstanceInPath,
    caller: ClientPrincipal,
    service: Service,
    incarnation: IncarnationInQuery = None,
) -> None:
    """End a lease.

    The instance's chunks are not found from now on. Ends only what the caller could take: a
    lease of its tenant, or with the role `storage` or `admin` one of theirs. 204 also if there was
    no such lease. 503: the index did not answer in time; repeat the call.
    """
    await service.index.end(owner_of(caller), instance, incarnation)


@instances_router.get(
    "/instances",
    **bodies.route(answer=InstancesAnswer, failing=(503,)),
)
async def list_instances(caller: ClientPrincipal, service: Service) -> Response:
    """List live leases.

    Those that tokens of the caller's tenant took; for the roles `storage` and `admin` also those
    that tokens of these roles took. 503: the index did not answer in time.
    """
    found = await service.index.instances(caller.tenant)
    if speaks_for_all_tenants(caller.role):
        found += await service.index.instances(SHARED_OWNER)
    return json_answer(InstancesAnswer(sorted(found, key=lambda entry: entry.instance)))


@events_router.post(
    "/events",
    **bodies.route(EVENTS, packed=EventsAck, failing=(403, 503)),
)
async def report_events(request: Request, caller: ClientPrincipal, service: Service) -> Response:
    """Report stores and removals.

    Needs a live lease of this incarnation. Events applied before are skipped, so a batch may be
    repeated; after a gap or without the lease none is applied, and the answer requests a resync.
    403: chunks of another tenant, whose events need the role `storage` or `admin`. 503: the index
    did not answer in time; repeat the batch.
    """
    return packed_answer(await service.take(caller, await EVENTS.read(request)))


@lookup_router.get(
    "/stats",
    **bodies.route(answer=StatsAnswer, failing=(403,)),
)
async def get_stats(
    caller: ClientPrincipal, service: Service, tenant: TenantInQuery = None
) -> Response:
    """Show figures of the index.

    Of one tenant. An index that does not answer in time is `degraded`, not an error. 403:
    another tenant's need the role `admin`.
    """
    return json_answer(await service.stats(tenant_for(caller, tenant)))


@admin_router.get(
    "/admin/tenants",
    **bodies.route(answer=TenantsAnswer, failing=(503,)),
)
async def list_tenants(
    caller: AdminPrincipal,
    service: Service,
    after: TenantBefore = None,
    limit: Limit = MAX_TENANTS_PER_ANSWER,
) -> Response:
    """List tenants with chunks.

    A page of their names, sorted. 503: the index did not answer in time.
    """
    found = [tenant for tenant in await service.index.tenants() if tenant > (after or "")]
    page = found[:limit]
    return json_answer(TenantsAnswer(page, page[-1] if len(found) > limit else None))


@admin_router.post(
    "/admin/evict",
    **bodies.route(EVICT, EvictedAnswer, failing=(503,)),
)
async def evict_chunks(request: Request, caller: AdminPrincipal, service: Service) -> Response:
    """Remove holders of chunks.

    The instances keep the chunks and may announce them again. 503: the index did not answer in
    time; repeat the call.
    """
    body = await EVICT.read(request)
    num_evicted = await service.index.evict(tenant_for(caller, body.tenant), body.ids)
    return json_answer(EvictedAnswer(num_evicted))


@admin_router.post("/admin/clear", status_code=204, responses=failures(503))
async def clear_tenant(
    caller: AdminPrincipal, service: Service, tenant: TenantInQuery = None
) -> None:
    """Clear a tenant's index.

    The instances with leases of this tenant, and storage servers, are told to announce all their
    chunks again. The chunks themselves stay.
    503: the index did not answer in time; repeat the call.
    """
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
