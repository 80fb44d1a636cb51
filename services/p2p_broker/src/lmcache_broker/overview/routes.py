"""`/v1/overview`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_broker.dependencies import Parts
from lmcache_broker.overview.history import MAX_SAMPLES
from lmcache_broker.overview.schemas import OverviewView

router = APIRouter(prefix="/v1", tags=["overview"], route_class=GuardedRoute)


@router.get("/overview", response_model=OverviewView, summary="The peers and their work")
async def overview(
    principal: ClientPrincipal,
    parts: Parts,
    max_samples: Annotated[
        int, Query(ge=0, le=MAX_SAMPLES, description="So many of the latest intervals.")
    ] = MAX_SAMPLES,
) -> Response:
    """The caller's tenant's and the shared ones: what the web page at `/` shows."""
    view = await parts.overview.of(principal, max_samples)
    return Response(
        view.model_dump_json(), media_type="application/json", headers={"Cache-Control": "no-store"}
    )
