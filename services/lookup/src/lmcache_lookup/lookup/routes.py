"""`POST /v1/{lookup,route,contains}`, `GET /v1/chunks/{chunk_id}/locations`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from lmcache_core.lookup.messages import ContainsAnswer, LocationsAnswer, LookupAnswer, RouteAnswer
from lmcache_core.lookup.requests import JSON
from lmcache_core.lookup.runs import PackedLookupAnswer
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_lookup.dependencies import Lookup
from lmcache_lookup.formats import answered, packed_answer, wants_packed
from lmcache_lookup.lookup.direct import DirectRoute
from lmcache_lookup.lookup.plain import plain_json
from lmcache_lookup.lookup.schemas import CHUNKS
from lmcache_lookup.openapi import documented
from lmcache_lookup.schemas import ChunkIdInPath

router = APIRouter(prefix="/v1", tags=["lookup"], route_class=GuardedRoute)
questions = APIRouter(prefix="/v1", tags=["lookup"], route_class=DirectRoute)


@questions.post(
    "/lookup",
    summary="Longest cached prefix and who holds it",
    **documented(CHUNKS, LookupAnswer, PackedLookupAnswer),
)
async def lookup(request: Request, caller: ClientPrincipal, service: Lookup) -> Response:
    """Answers up to 8192 chunks in one round trip; without the index the answer is empty and
    `degraded`.
    """
    packed = wants_packed(request)
    body = await CHUNKS.read(request)
    answer = await service.lookup(caller.tenant, body.ids, body.exclude)
    return packed_answer(answer) if packed else Response(plain_json(answer), media_type=JSON)


@questions.post(
    "/route", summary="Longest prefix that each instance holds", **documented(CHUNKS, RouteAnswer)
)
async def route(request: Request, caller: ClientPrincipal, service: Lookup) -> Response:
    """For routers that send a request to the engine which has most of its prefix."""
    body = await CHUNKS.read(request)
    return answered(request, await service.route(caller.tenant, body.ids, body.exclude))


@questions.post(
    "/contains",
    summary="Which of these chunks somebody holds",
    **documented(CHUNKS, ContainsAnswer),
)
async def contains(request: Request, caller: ClientPrincipal, service: Lookup) -> Response:
    """Each chunk by itself, wherever it stands."""
    body = await CHUNKS.read(request)
    return answered(request, await service.contains(caller.tenant, body.ids, body.exclude))


@router.get(
    "/chunks/{chunk_id}/locations",
    summary="Everybody who holds a chunk",
    **documented(answer=LocationsAnswer),
)
async def locations(
    request: Request, chunk_id: ChunkIdInPath, caller: ClientPrincipal, service: Lookup
) -> Response:
    """An empty list where nobody is known to hold it."""
    return answered(request, await service.locations(caller.tenant, bytes.fromhex(chunk_id)))
