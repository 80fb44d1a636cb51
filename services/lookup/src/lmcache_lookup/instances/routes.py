"""`PUT DELETE /v1/instances/{id}`, `GET /v1/instances`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from lmcache_core.lookup.messages import InstanceLease
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_lookup.dependencies import Index, Metrics, Settings
from lmcache_lookup.formats import answered
from lmcache_lookup.index import LeaseClaim
from lmcache_lookup.instances.schemas import LEASE, InstanceEntry, InstancesAnswer
from lmcache_lookup.openapi import documented
from lmcache_lookup.schemas import IncarnationInQuery, InstanceInPath

router = APIRouter(prefix="/v1", tags=["instances"], route_class=GuardedRoute)


@router.put(
    "/instances/{instance}", summary="Take or renew a lease", **documented(LEASE, InstanceLease)
)
async def renew(
    request: Request,
    instance: InstanceInPath,
    caller: ClientPrincipal,
    index: Index,
    settings: Settings,
    metrics: Metrics,
) -> Response:
    """What the instance holds counts until the lease ends."""
    body = await LEASE.read(request)
    ttl_ms = settings.granted_ttl_ms(body.ttl_ms)
    state = await index.renew(
        caller.tenant, LeaseClaim(instance, body.incarnation, body.kind, ttl_ms)
    )
    metrics.resyncs.inc(state.resync)
    return answered(request, InstanceLease(ttl_ms, state.next_sequence, state.resync))


@router.delete("/instances/{instance}", summary="End a lease", status_code=204)
async def end(
    instance: InstanceInPath,
    caller: ClientPrincipal,
    index: Index,
    incarnation: IncarnationInQuery | None = None,
) -> None:
    """Fine where there is none. With `incarnation`, a lease that a later life of the instance
    took meanwhile is left alone.
    """
    await index.end(caller.tenant, instance, incarnation)


@router.get("/instances", summary="Live leases", **documented(answer=InstancesAnswer))
async def instances(request: Request, caller: ClientPrincipal, index: Index) -> Response:
    """Those that tokens of the caller's tenant took."""
    found = await index.instances(caller.tenant)
    entries = [
        InstanceEntry(
            one.instance, one.kind, one.incarnation, one.next_sequence, max(one.expires_in_ms, 0)
        )
        for one in found
    ]
    return answered(request, InstancesAnswer(entries))
