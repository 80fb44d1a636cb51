"""The REST interface: `/v1/peers`, `/v1/stats`, `/v1/transfers` and `/v1/overview`.

Its messages are those of `lmcache_core.p2p.messages`, and a few for people.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from lmcache_core.addresses import is_loopback, may_be_loopback
from lmcache_core.errors import ConfigError
from lmcache_core.names import INSTANCE_PATTERN
from lmcache_core.p2p import Lease, Peer, PeerStatus, parse_distributed_url
from lmcache_core.p2p.messages import (
    MAX_COPIES_PER_LEASE,
    AnnounceRequest,
    PeersResponse,
    PullsRequest,
    RenewResponse,
    TransferRequest,
    TransferResponse,
)
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute
from lmcache_servicekit.bodies import BodyTypes, RequestBody, invalid, json_answer

from lmcache_broker.overview import MAX_SAMPLES, BrokerOverview, Overview
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.settings import BrokerSettings
from lmcache_broker.transfers.hot import HotChunks
from lmcache_broker.transfers.scheduler import TransferScheduler


class BrokerStats(msgspec.Struct, frozen=True):
    """Figures of the peers visible to the caller.

    Attributes:
        num_peers: Live peers.
        num_draining: Of these, peers that get no new pulls.
        num_pulls: Pulls underway: tickets that have neither ended nor expired.
        max_pulls_per_peer: Pulls that one peer serves at a time; further ones wait.
        num_waiting: Requests, of all tenants, that wait for a slot.
        is_shared: Whether the store shared with other brokers is available; false without one.
    """

    num_peers: int
    num_draining: int
    num_pulls: int
    max_pulls_per_peer: int
    num_waiting: int
    is_shared: bool


class EndedPulls(msgspec.Struct, frozen=True):
    """Pulls that were ended.

    Attributes:
        num_ended: How many of them were unfinished pulls of the requester.
    """

    num_ended: int


ANNOUNCE: Final = RequestBody(AnnounceRequest)
TRANSFER: Final = RequestBody(TransferRequest)
PULLS: Final = RequestBody(PullsRequest)

bodies: Final = BodyTypes()


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts of one broker; they live as long as its app."""

    settings: BrokerSettings
    registry: PeerRegistry
    scheduler: TransferScheduler
    hot: HotChunks
    overview: BrokerOverview


async def broker_parts(request: Request) -> BrokerParts:
    """Return the running broker."""
    parts = request.app.state.broker
    assert isinstance(parts, BrokerParts)
    return parts


Parts = Annotated[BrokerParts, Depends(broker_parts)]
PeerIdPath = Annotated[
    str,
    Path(pattern=f"^{INSTANCE_PATTERN}$", description="The peer's instance id, as at lookup."),
]

peers_router = APIRouter(prefix="/v1", tags=["peers"], route_class=GuardedRoute)
transfers_router = APIRouter(prefix="/v1", tags=["transfers"], route_class=GuardedRoute)
overview_router = APIRouter(prefix="/v1", tags=["overview"], route_class=GuardedRoute)
admin_router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=GuardedRoute)
ROUTERS: Final = (peers_router, transfers_router, overview_router, admin_router)


@peers_router.put(
    "/peers/{peer_id}",
    **bodies.route(ANNOUNCE, Lease, failing=(400, 403, 409, 507)),
)
async def announce_peer(
    request: Request, peer_id: PeerIdPath, principal: ClientPrincipal, parts: Parts
) -> Response:
    """Register a peer, or renew its lease.

    A heartbeat: the peer gets pulls until its lease ends. A client's peer serves its tenant;
    those of the roles `storage` and `admin` serve all tenants. The answer may ask the peer to
    drain, or to copy hot chunks. 400: a peer elsewhere names a loopback address. 403: the role does
    not allow this kind. 409: a later incarnation is registered. 507: too many peers.
    """
    body = await ANNOUNCE.read(request)
    _refuse_foreign_loopback(body.distributed_url, request)
    peer = Peer(peer_id, body.incarnation, body.distributed_url, body.kind, body.zone, body.node)
    lease = await parts.registry.announce(
        principal,
        peer,
        load=body.load,
        ttl_ms=parts.settings.default_lease_ttl_ms if body.ttl_ms is None else body.ttl_ms,
        draining=body.draining,
        drain=body.drain or None,
        figures=body.figures or None,
    )
    copies = parts.hot.orders_for(principal, peer_id, time.monotonic())
    copies += await parts.registry.take_orders(principal.tenant, peer_id)
    return json_answer(msgspec.structs.replace(lease, copies=tuple(copies[:MAX_COPIES_PER_LEASE])))


def _refuse_foreign_loopback(distributed_url: str, request: Request) -> None:
    """Refuse a remote peer with a loopback address: others would connect to themselves."""
    host, caller = parse_distributed_url(distributed_url).host, request.client
    if may_be_loopback(host) and caller is not None and not is_loopback(caller.host):
        raise ConfigError(
            f"distributed_url={distributed_url}: {host} is reachable only from its own machine;"
            " name an address of this peer"
        )


@peers_router.get("/peers", **bodies.route(answer=PeersResponse))
async def list_peers(principal: ClientPrincipal, parts: Parts) -> Response:
    """List the live peers.

    Those of the caller's tenant, and shared ones. Each was announced, or discovered from
    outside, and its lease has not ended.
    """
    return json_answer(PeersResponse(await parts.registry.visible(principal)))


@peers_router.get(
    "/peers/{peer_id}",
    **bodies.route(answer=PeerStatus, failing=(404,)),
)
async def get_peer(peer_id: PeerIdPath, principal: ClientPrincipal, parts: Parts) -> Response:
    """Show a live peer.

    A storage server, or else one of the caller's tenant, or else a shared one. 404: no such peer is
    live.
    """
    return json_answer(await parts.registry.get(principal, peer_id))


@peers_router.delete("/peers/{peer_id}", status_code=204)
async def end_peer(peer_id: PeerIdPath, principal: ClientPrincipal, parts: Parts) -> Response:
    """End a peer's lease.

    It gets no new pulls from now on; tickets stay valid. Ends only what the caller could
    announce: its tenant's peer, or a shared one with the role `storage` or `admin`. 204 also if
    there was none.
    """
    await parts.registry.remove(principal, peer_id)
    return Response(status_code=204)


@admin_router.post(
    "/peers/{peer_id}:drain",
    **bodies.route(answer=PeerStatus, failing=(404,)),
)
# Where `lmcachectl` of the preview calls it.
@peers_router.post("/peers/{peer_id}:drain", include_in_schema=False)
async def drain_peer(peer_id: PeerIdPath, principal: AdminPrincipal, parts: Parts) -> Response:
    """Give a peer no new pulls.

    Lasts for its incarnation; the peer learns of it with its next heartbeat, and hands over its
    chunks. 404: no such peer is live. 503: the store that brokers share is unavailable.
    """
    return json_answer(await parts.registry.drain(principal, peer_id))


@peers_router.get("/stats", **bodies.route(answer=BrokerStats))
async def get_stats(principal: ClientPrincipal, parts: Parts) -> Response:
    """Show figures.

    Of the peers of the caller's tenant and the shared ones.
    """
    peers = await parts.registry.visible(principal)
    return json_answer(
        BrokerStats(
            num_peers=len(peers),
            num_draining=sum(peer.draining for peer in peers),
            num_pulls=sum(peer.num_pulls for peer in peers),
            max_pulls_per_peer=parts.settings.max_pulls_per_peer,
            num_waiting=len(parts.scheduler.waiting),
            is_shared=parts.registry.is_shared,
        )
    )


@transfers_router.post("/transfers", **bodies.route(TRANSFER, TransferResponse))
async def assign_transfers(request: Request, principal: ClientPrincipal, parts: Parts) -> Response:
    """Assign chunks to peers.

    Each assignment is a pull with a ticket to present over lm:// to the peer that serves it; it
    takes a slot there until it is ended or its ticket expires. Near, idle peers with the chunk in
    memory are preferred. If all holders are busy, waits up to `wait_ms`; then, or if the queue is
    full, nothing is assigned. Tickets are valid for the caller's tenant. 422 also if a chunk
    appears twice, or `tiers` does not match `holders`.
    """
    body = await TRANSFER.read(request)
    wanted = {chunk.chunk_id: chunk for chunk in body.chunks}
    if len(wanted) != len(body.chunks):
        raise invalid("a chunk id appears twice", "chunks")
    if any(chunk.tiers and len(chunk.tiers) != len(chunk.holders) for chunk in body.chunks):
        raise invalid("tiers must name one for each holder, or be omitted", "chunks")
    return json_answer(await parts.scheduler.ask(principal, body.requester, wanted, body.wait_ms))


@transfers_router.post("/transfers:renew", **bodies.route(PULLS, RenewResponse))
async def renew_transfers(request: Request, principal: ClientPrincipal, parts: Parts) -> Response:
    """Renew pulls.

    Extends pulls by another ticket's lifetime, up to ten minutes in all. At any broker that
    shares the store. Unknown pulls, and those of another requester, are omitted: request them
    again.
    """
    body = await PULLS.read(request)
    renewed = await parts.scheduler.renew(principal, body.requester, body.pulls)
    return json_answer(RenewResponse(tuple(renewed)))


@transfers_router.post("/transfers:done", **bodies.route(PULLS, EndedPulls))
async def end_transfers(request: Request, principal: ClientPrincipal, parts: Parts) -> Response:
    """End pulls.

    Frees their slots before the tickets expire. At any broker that shares the store. Unknown
    pulls, and those of another requester, are ignored.
    """
    body = await PULLS.read(request)
    return json_answer(EndedPulls(await parts.scheduler.end(principal, body.requester, body.pulls)))


@overview_router.get("/overview", **bodies.route(answer=Overview))
async def get_overview(
    principal: ClientPrincipal,
    parts: Parts,
    max_samples: Annotated[
        int, Query(ge=0, le=MAX_SAMPLES, description="Largest number of samples; the latest come.")
    ] = MAX_SAMPLES,
) -> Response:
    """Show peers and their work.

    The data of the web page at `/`: the peers of the caller's tenant and the shared ones, and
    what they counted, as this broker heard it. An admin also sees what each tenant saved. Not to be
    stored by caches.
    """
    answer = json_answer(await parts.overview.of(principal, max_samples))
    answer.headers["Cache-Control"] = "no-store"
    return answer
