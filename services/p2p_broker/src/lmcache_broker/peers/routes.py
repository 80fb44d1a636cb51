"""`/v1/peers` and `/v1/stats`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from lmcache_core.errors import ConfigError
from lmcache_core.p2p import parse_distributed_url
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute
from lmcache_servicekit.settings import is_loopback

from lmcache_broker.dependencies import Parts
from lmcache_broker.peers.schemas import (
    AnnounceBody,
    LeaseView,
    PeerIdPath,
    PeersView,
    PeerView,
    StatsView,
)
from lmcache_broker.peers.service import Census

router = APIRouter(prefix="/v1", tags=["peers"], route_class=GuardedRoute)


@router.put("/peers/{peer_id}", summary="Register a peer, or renew its lease")
async def announce(
    request: Request,
    peer_id: PeerIdPath,
    body: AnnounceBody,
    principal: ClientPrincipal,
    parts: Parts,
) -> LeaseView:
    """A client's peer is a sidecar of its tenant. Storage servers (role `storage`) and an
    admin's peers serve all tenants.
    """
    _refuse_foreign_loopback(body.distributed_url, request)
    ttl_ms = parts.settings.default_lease_ttl_ms if body.ttl_ms is None else body.ttl_ms
    drain = None if body.drain is None else body.drain.to_report()
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


@router.get("/peers", summary="List the live peers")
async def list_peers(principal: ClientPrincipal, parts: Parts) -> PeersView:
    """The caller's tenant's and the shared ones."""
    return PeersView(
        peers=[PeerView.model_validate(peer) for peer in await parts.registry.visible(principal)]
    )


@router.get("/peers/{peer_id}", summary="Show a live peer")
async def show_peer(peer_id: PeerIdPath, principal: ClientPrincipal, parts: Parts) -> PeerView:
    """404 when none of that id is live."""
    return PeerView.model_validate(await parts.registry.get(principal, peer_id))


@router.delete("/peers/{peer_id}", status_code=204, summary="End a peer's lease")
async def remove_peer(peer_id: PeerIdPath, principal: ClientPrincipal, parts: Parts) -> Response:
    """Ending a lease that has ended already is fine."""
    await parts.registry.remove(principal, peer_id)
    return Response(status_code=204)


@router.post("/peers/{peer_id}:drain", summary="Give a peer no new pulls")
async def drain_peer(peer_id: PeerIdPath, principal: AdminPrincipal, parts: Parts) -> PeerView:
    """Lasts for the peer's incarnation; the peer learns of it with its next heartbeat."""
    return PeerView.model_validate(await parts.registry.drain(principal, peer_id))


@router.get("/stats", summary="Figures")
async def stats(principal: ClientPrincipal, parts: Parts) -> StatsView:
    """Of the peers that the caller may see."""
    census = Census.of(await parts.registry.visible(principal))
    return StatsView(
        num_peers=census.num_peers,
        num_draining=census.num_draining,
        num_pulls=census.num_pulls,
        max_pulls_per_peer=parts.settings.max_pulls_per_peer,
        num_waiting=parts.desk.num_waiting,
        is_shared=parts.registry.is_shared,
    )
