"""`PUT DELETE /v1/instances/{id}`, `GET /v1/instances`."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter
from lmcache_servicekit.auth import ClientPrincipal

from lmcache_lookup.dependencies import Index, Metrics, Settings
from lmcache_lookup.index import LeaseClaim
from lmcache_lookup.instances.schemas import InstanceBody, InstancesBody, LeaseAnswerBody, LeaseBody
from lmcache_lookup.schemas import Incarnation, InstanceId

router = APIRouter(prefix="/v1", tags=["instances"])


@router.put("/instances/{instance}", summary="Take or renew a lease")
async def renew(
    instance: InstanceId, body: LeaseBody, caller: ClientPrincipal, index: Index, settings: Settings, metrics: Metrics
) -> LeaseAnswerBody:
    """What the instance holds counts until the lease ends."""
    ttl_ms = settings.granted_ttl_ms(body.ttl_ms)
    state = await index.renew(caller.tenant, LeaseClaim(instance, body.incarnation, body.kind, ttl_ms))
    metrics.resyncs.inc(state.resync)
    return LeaseAnswerBody(ttl_ms=ttl_ms, next_sequence=state.next_sequence, resync=state.resync)


@router.delete("/instances/{instance}", summary="End a lease", status_code=204)
async def end(instance: InstanceId, caller: ClientPrincipal, index: Index, incarnation: Incarnation | None = None) -> None:
    """Fine where there is none. With `incarnation`, a lease that a later life of the instance took meanwhile is left alone."""
    await index.end(caller.tenant, instance, incarnation)


@router.get("/instances", summary="Live leases")
async def instances(caller: ClientPrincipal, index: Index) -> InstancesBody:
    """Those that tokens of the caller's tenant took."""
    found = await index.instances(caller.tenant)
    return InstancesBody(instances=[InstanceBody(**dataclasses.asdict(status)) for status in found])
