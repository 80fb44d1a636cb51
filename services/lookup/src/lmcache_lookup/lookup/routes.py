"""`POST /v1/lookup`, `POST /v1/route`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Response
from lmcache_servicekit.auth import ClientPrincipal

from lmcache_lookup.dependencies import Lookup
from lmcache_lookup.lookup.schemas import LookupAnswerBody, LookupBody, RouteAnswerBody, RouteBody

router = APIRouter(prefix="/v1", tags=["lookup"])

# Documentation only: answers may hold thousands of holders, and are encoded without going through a model.
_LOOKUP_ANSWER: dict[int | str, dict[str, Any]] = {200: {"model": LookupAnswerBody}}
_ROUTE_ANSWER: dict[int | str, dict[str, Any]] = {200: {"model": RouteAnswerBody}}


@router.post(
    "/lookup", summary="Longest cached prefix and who holds it", responses={200: {"model": LookupAnswerBody}}, response_class=Response
)
async def lookup(body: LookupBody, caller: ClientPrincipal, service: Lookup) -> Response:
    """Answers up to 8192 chunks in one round trip; without the index the answer is empty and `degraded`."""
    answer = await service.lookup(caller.tenant, [bytes.fromhex(text) for text in body.chunk_ids], body.exclude)
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post(
    "/route", summary="Longest prefix that each instance holds", responses={200: {"model": RouteAnswerBody}}, response_class=Response
)
async def route(body: RouteBody, caller: ClientPrincipal, service: Lookup) -> Response:
    """For routers that send a request to the engine which has most of its prefix."""
    answer = await service.route(caller.tenant, [bytes.fromhex(text) for text in body.chunk_ids])
    return Response(msgspec.json.encode(answer), media_type="application/json")
