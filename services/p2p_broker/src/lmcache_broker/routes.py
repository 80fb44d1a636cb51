"""The REST interface: `/v1/peers`, `/v1/stats`, `/v1/transfers` and `/v1/overview`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from lmcache_core.errors import ConfigError
from lmcache_core.p2p import DrainReport, parse_distributed_url
from lmcache_core.p2p.messages import MAX_COPIES_PER_LEASE
from lmcache_core.security import Principal
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute
from lmcache_servicekit.settings import is_loopback

from lmcache_broker.bodies import (
    AnnounceBody,
    CopyView,
    DoneView,
    LeaseView,
    OverviewView,
    PeerIdPath,
    PeersView,
    PeerView,
    PullsBody,
    RenewView,
    StatsView,
    TransferBody,
    TransferView,
)
from lmcache_broker.overview import MAX_SAMPLES, BrokerOverview
from lmcache_broker.peers.directory import Census
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.settings import BrokerSettings
from lmcache_broker.transfers.hot import HotChunks
from lmcache_broker.transfers.scheduler import TransferScheduler


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts of one broker; they live as long as its app."""

    settings: BrokerSettings
    registry: PeerRegistry
    scheduler: TransferScheduler
    hot: HotChunks
    overview: BrokerOverview

    async def copies_for(self, principal: Principal, peer_id: str) -> list[CopyView]:
        """What a peer is to copy to others, as this broker and the others want it; it is told
        once.
        """
        orders = self.hot.orders_for(principal, peer_id, time.monotonic())
        orders += await self.registry.take_orders(principal.tenant, peer_id)
        return [CopyView.model_validate(order) for order in orders[:MAX_COPIES_PER_LEASE]]


async def broker_parts(request: Request) -> BrokerParts:
    """The running broker."""
    parts = request.app.state.broker
    assert isinstance(parts, BrokerParts)
    return parts


Parts = Annotated[BrokerParts, Depends(broker_parts)]

peers_router = APIRouter(prefix="/v1", tags=["peers"], route_class=GuardedRoute)
transfers_router = APIRouter(prefix="/v1", tags=["transfers"], route_class=GuardedRoute)
overview_router = APIRouter(prefix="/v1", tags=["overview"], route_class=GuardedRoute)


@peers_router.put("/peers/{peer_id}", summary="Register a peer, or renew its lease")
async def announce(
    request: Request,
    peer_id: PeerIdPath,
    body: AnnounceBody,
    principal: ClientPrincipal,
    parts: Parts,
) -> LeaseView:
    """A client's peer serves its tenant; those of `storage` and `admin` serve all tenants."""
    _refuse_foreign_loopback(body.distributed_url, request)
    ttl_ms = parts.settings.default_lease_ttl_ms if body.ttl_ms is None else body.ttl_ms
    drain = None if body.drain is None else DrainReport(**body.drain.model_dump())
    peer = body.to_peer(peer_id)
    figures = None if body.figures is None else body.figures.to_figures()
    lease = await parts.registry.announce(
        principal,
        peer,
        load=body.load,
        ttl_ms=ttl_ms,
        draining=body.draining,
        drain=drain,
        figures=figures,
    )
    return LeaseView(
        ttl_ms=lease.ttl_ms,
        draining=lease.draining,
        copies=await parts.copies_for(principal, peer_id),
    )


def _refuse_foreign_loopback(distributed_url: str, request: Request) -> None:
    """A peer elsewhere that says it is at the loopback address would make others connect to
    themselves.
    """
    host, caller = parse_distributed_url(distributed_url).host, request.client
    if is_loopback(host) and caller is not None and not is_loopback(caller.host):
        raise ConfigError(
            f"distributed_url={distributed_url}: {host} is reached only from its own machine; name"
            " an address of this peer"
        )


@peers_router.get("/peers", summary="List the live peers")
async def list_peers(principal: ClientPrincipal, parts: Parts) -> PeersView:
    """Those of the caller's tenant, and shared ones."""
    return PeersView(
        peers=[PeerView.model_validate(peer) for peer in await parts.registry.visible(principal)]
    )


@peers_router.get("/peers/{peer_id}", summary="Show a live peer")
async def show_peer(peer_id: PeerIdPath, principal: ClientPrincipal, parts: Parts) -> PeerView:
    """404 if it is not live."""
    return PeerView.model_validate(await parts.registry.get(principal, peer_id))


@peers_router.delete("/peers/{peer_id}", status_code=204, summary="End a peer's lease")
async def remove_peer(peer_id: PeerIdPath, principal: ClientPrincipal, parts: Parts) -> Response:
    """Idempotent."""
    await parts.registry.remove(principal, peer_id)
    return Response(status_code=204)


@peers_router.post("/peers/{peer_id}:drain", summary="Give a peer no new pulls")
async def drain_peer(peer_id: PeerIdPath, principal: AdminPrincipal, parts: Parts) -> PeerView:
    """Lasts for its incarnation; the peer learns of it with its next heartbeat."""
    return PeerView.model_validate(await parts.registry.drain(principal, peer_id))


@peers_router.get("/stats", summary="Show figures")
async def stats(principal: ClientPrincipal, parts: Parts) -> StatsView:
    """Of the peers visible to the caller."""
    census = Census.of(await parts.registry.visible(principal))
    return StatsView(
        num_peers=census.num_peers,
        num_draining=census.num_draining,
        num_pulls=census.num_pulls,
        max_pulls_per_peer=parts.settings.max_pulls_per_peer,
        num_waiting=parts.scheduler.num_waiting,
        is_shared=parts.registry.is_shared,
    )


@transfers_router.post("/transfers", summary="Assign chunks to peers")
async def assign(body: TransferBody, principal: ClientPrincipal, parts: Parts) -> TransferView:
    """Tickets are valid for the caller's tenant."""
    return await parts.scheduler.ask(principal, body.requester, body.wanted(), body.wait_ms)


@transfers_router.post("/transfers:renew", summary="Renew pulls")
async def renew(body: PullsBody, principal: ClientPrincipal, parts: Parts) -> RenewView:
    """For another ticket's life. Unknown pulls are left out: request them again."""
    renewed = await parts.scheduler.renew(principal, body.requester, body.pulls)
    return RenewView(renewed=renewed)


@transfers_router.post("/transfers:done", summary="End pulls")
async def done(body: PullsBody, principal: ClientPrincipal, parts: Parts) -> DoneView:
    """Frees their places before the tickets expire. Unknown pulls are ignored."""
    return DoneView(num_ended=await parts.scheduler.end(principal, body.requester, body.pulls))


@overview_router.get("/overview", response_model=OverviewView, summary="Show peers and their work")
async def overview(
    principal: ClientPrincipal,
    parts: Parts,
    max_samples: Annotated[
        int, Query(ge=0, le=MAX_SAMPLES, description="So many of the latest intervals.")
    ] = MAX_SAMPLES,
) -> Response:
    """The data of the web page at `/`."""
    view = await parts.overview.of(principal, max_samples)
    return Response(
        view.model_dump_json(), media_type="application/json", headers={"Cache-Control": "no-store"}
    )
