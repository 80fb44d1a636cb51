"""`/v1/transfers`."""

from __future__ import annotations

from fastapi import APIRouter
from lmcache_servicekit.auth import ClientPrincipal

from lmcache_broker.dependencies import Parts
from lmcache_broker.transfers.schemas import TransferBody, TransferView

router = APIRouter(prefix="/v1", tags=["transfers"])


@router.post("/transfers", summary="Ask who should serve chunks")
async def assign(body: TransferBody, principal: ClientPrincipal, parts: Parts) -> TransferView:
    """Tickets are good for the caller's tenant."""
    plan = parts.transfers.assign(principal, body.requester, body.holders_by_chunk())
    return TransferView.model_validate(plan)
