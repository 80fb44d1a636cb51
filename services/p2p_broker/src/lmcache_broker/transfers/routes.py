"""`/v1/transfers`."""

from __future__ import annotations

from fastapi import APIRouter
from lmcache_servicekit.auth import ClientPrincipal, GuardedRoute

from lmcache_broker.dependencies import Parts
from lmcache_broker.transfers.schemas import (
    DoneView,
    PullsBody,
    RenewView,
    TransferBody,
    TransferView,
)

router = APIRouter(prefix="/v1", tags=["transfers"], route_class=GuardedRoute)


@router.post("/transfers", summary="Ask who should serve chunks")
async def assign(body: TransferBody, principal: ClientPrincipal, parts: Parts) -> TransferView:
    """Tickets are good for the caller's tenant."""
    plan = await parts.desk.ask(principal, body.requester, body.wanted(), body.wait_ms)
    return TransferView.model_validate(plan)


@router.post("/transfers:renew", summary="Let pulls go on")
async def renew(body: PullsBody, principal: ClientPrincipal, parts: Parts) -> RenewView:
    """For the life of another ticket. Those that are not known are left out: they are to be
    asked for anew.
    """
    return RenewView.model_validate(
        {"renewed": await parts.desk.renew(principal, body.requester, body.pulls)},
        from_attributes=True,
    )


@router.post("/transfers:done", summary="Say that pulls are over")
async def done(body: PullsBody, principal: ClientPrincipal, parts: Parts) -> DoneView:
    """So that others need not wait for the ends of their tickets. Those that are not known are
    passed over.
    """
    return DoneView(num_ended=await parts.desk.end(principal, body.requester, body.pulls))
