"""`/v1`: status, tiers, clients; `/v1/admin`: chunks, evict, clear, drain."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from lmcache_core.storage.stack import LOCAL_TIERS
from lmcache_node.admin import (
    ClearAnswer,
    DrainAnswer,
    DrainView,
    EvictAnswer,
    EvictBytesRequest,
    Wait,
)
from lmcache_servicekit.auth import GuardedRoute, RoleRequired
from lmcache_servicekit.bodies import ApiModel
from lmcache_servicekit.problems import failures
from lmcache_servicekit.state import version_of
from pydantic import ConfigDict, Field

from lmcache_sidecar.sidecar import RunningSidecar, SidecarNode

MAX_PAGE = 1000

LocalTier = Literal["memory", "disk"]


class RecoveryView(ApiModel):
    """Chunks that an earlier start left in shared memory."""

    model_config = ConfigDict(from_attributes=True)

    is_over: bool
    """Whether each of them is served again or freed."""
    found_chunks: int
    """Chunks in memory when this process started."""
    checked_chunks: int
    """Of these, chunks whose digest has been verified."""
    recovered_chunks: int
    """Chunks that are served again."""
    damaged_chunks: int
    """Chunks whose content had changed."""
    dropped_chunks: int
    """Chunks that were too old, over a quota, or stored again since."""


class ArenaView(ApiModel):
    """Shared memory across restarts of the sidecar."""

    model_config = ConfigDict(from_attributes=True)

    is_recorded: bool
    """Whether the next start will find what is in memory now."""
    huge_pages: bool
    """Whether the kernel was asked for huge pages."""
    lent_bytes: int
    """Memory that clients of earlier starts may still write to; not in use."""
    recovery: RecoveryView
    """What became of the chunks of an earlier start."""


class Status(ApiModel):
    """The sidecar at a glance."""

    instance: str
    """Id of this sidecar at lookup and broker."""
    version: str
    """Its release."""
    uptime_s: float
    """Seconds since it started."""
    distributed_url: str
    """Where peers reach it, `lm://host:port` or `lm+tls://host:port`."""
    generation: str
    """Number of its shared memory, 16 hex digits, new with each start."""
    arena_bytes: int
    """Size of the shared memory in bytes."""
    arena: ArenaView
    """What of the shared memory outlives a restart."""
    verify_hot: str
    """Which loads from shared memory check digests: `always`, `sampled` (1 in 16), `never`, or
    `auto`: `sampled` for KV on a GPU, else `always`.
    """
    accepts_handover: bool
    """Whether peers may hand over chunks now."""
    draining: bool
    """Whether a drain has begun here, or the broker sends no pulls here."""
    drain: DrainView
    """Progress of its drain."""
    num_clients: int
    """Open connections to its socket; an engine has one for each process."""
    registered: bool | None
    """Whether lookup and broker know this sidecar; null: one of them is not configured."""
    settled: bool
    """Whether everything stored has reached the slower tiers and lookup."""
    pending_bytes: int
    """Bytes waiting to be written to slower tiers."""
    reserved_bytes: int
    """Shared memory that engines are filling."""
    held_bytes: int
    """Shared memory held for engines: chunks that they load, or that are staged for them."""
    pinned_bytes: int
    """Shared memory pinned by operators (`POST /v1/admin/pin`)."""


class Description(ApiModel):
    """How engines of one model name KV."""

    model_config = ConfigDict(from_attributes=True)

    fmt: str
    """Format of the engine's KV, for example `vllm`."""
    model_name: str
    """The model, as the engine names it."""
    world_size: int
    """Ranks that share the KV of a token; each has its own chunks."""
    chunk_size: int
    """Tokens of a chunk."""
    groups: list[str]
    """Names of the groups of layers, each with its own chunks; `""` is the only one, or that with
    full attention.
    """


class ClientStatus(ApiModel):
    """One client of the socket: a process of an engine."""

    client: str
    """Name of the engine, the same for all of its processes."""
    pid: int
    """Its process id, as the client's own container counts."""
    rank: int
    """The rank whose KV it stores and loads."""
    world_size: int
    """Number of ranks of its engine."""
    model: str
    """The model, as the engine names it."""
    role: str
    """`kv_role` of a vLLM engine: `kv_both`, `kv_producer` or `kv_consumer`; else empty."""
    num_reservations: int
    """Pieces of shared memory that it is filling."""
    reserved_bytes: int
    """Their size in bytes."""
    num_pins: int
    """Chunks in shared memory that it is loading."""
    pinned_bytes: int
    """Their size in bytes; a chunk that is loaded twice counts twice."""
    num_tickets: int
    """Requests whose chunks are fetched or kept for it before the prefill."""
    descriptions: list[Description]
    """How it has named KV, the latest last; 64 at most."""


class Clients(ApiModel):
    """Connected clients."""

    clients: list[ClientStatus]
    """Those that have said who they are, one for each process of an engine."""


class Tiers(ApiModel):
    """Figures by tier."""

    tiers: dict[str, dict[str, int]]
    """Figures of each tier, by its name: `num_chunks`, `used_bytes`, `capacity_bytes` (0 if
    unknown) and the tier's own counters since the start.
    """


class Chunks(ApiModel):
    """A page of the chunks in shared memory."""

    chunks: list[str]
    """Their keys in the URL form, at most `limit`."""
    next_offset: int | None
    """The `offset` of the next page; null at the end."""


class ClearTiersRequest(ApiModel):
    """The tiers to clear."""

    model_config = ConfigDict(extra="forbid")

    tiers: list[LocalTier] | None = Field(None, min_length=1)
    """`memory` (shared memory), `disk`, or both; null: both."""


router = APIRouter(prefix="/v1", route_class=GuardedRoute)
client_role = Depends(RoleRequired("client"))
admin_role = Depends(RoleRequired("admin"))


@router.get("/status", tags=["status"], dependencies=[client_role])
async def get_status(sidecar: RunningSidecar) -> Status:
    """Show a summary.

    Of this moment; the counters of what it served are in `/metrics`.
    """
    clients = [session.memory for session in sidecar.socket_server.sessions]
    return Status(
        instance=sidecar.settings.instance_id,
        version=version_of("lmcache-sidecar"),
        uptime_s=round(time.monotonic() - sidecar.started_at, 3),
        distributed_url=sidecar.distributed_url,
        generation=f"{sidecar.arena.generation:016x}",
        arena_bytes=sidecar.arena.size,
        arena=ArenaView.model_validate(sidecar.arena_owner),
        verify_hot=sidecar.settings.verify_hot,
        accepts_handover=sidecar.takes_handovers(),
        draining=sidecar.is_draining,
        drain=DrainView.model_validate(sidecar.drain.progress),
        num_clients=len(clients),
        registered=sidecar.is_registered,
        settled=sidecar.is_settled,
        pending_bytes=sidecar.stack.num_pending_bytes,
        reserved_bytes=sum(memory.reserved_bytes for memory in clients),
        held_bytes=sum(memory.pinned_bytes for memory in clients)
        + sidecar.socket_server.context.staged.used_bytes,
        pinned_bytes=sidecar.pins.num_bytes,
    )


@router.get("/tiers", tags=["status"], dependencies=[client_role])
async def list_tiers(sidecar: RunningSidecar) -> Tiers:
    """Show figures by tier.

    Of shared memory, disk, peers and remote tier, as far as they are configured.
    """
    return Tiers(tiers=sidecar.stack.stats())


@router.get("/clients", tags=["status"], dependencies=[client_role])
async def list_clients(sidecar: RunningSidecar) -> Clients:
    """List clients connected to the socket.

    The processes of this pod's engines, and the memory that each holds.
    """
    return Clients(
        clients=[
            ClientStatus(
                client=session.engine.name,
                pid=session.engine.pid,
                rank=session.engine.rank,
                world_size=session.engine.world_size,
                model=session.engine.model,
                role=session.role,
                num_reservations=len(session.memory.reservations),
                reserved_bytes=session.memory.reserved_bytes,
                num_pins=len(session.memory.pins),
                pinned_bytes=session.memory.pinned_bytes,
                num_tickets=session.staging.num_tickets,
                descriptions=[
                    Description.model_validate(known)
                    for known in sidecar.descriptions.said_by(session)
                ],
            )
            for session in sidecar.socket_server.sessions
            if session.engine is not None
        ]
    )


@router.get("/admin/chunks", tags=["admin"], dependencies=[admin_role])
async def list_chunks(
    sidecar: RunningSidecar,
    offset: Annotated[int, Query(ge=0, description="Chunks to skip.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Largest number of chunks.")] = 100,
) -> Chunks:
    """List chunks in shared memory.

    In no order. Pages are not of one moment: chunks stored or evicted meanwhile may be skipped or
    appear twice.
    """
    held = await asyncio.to_thread(sidecar.stack.hot.held)
    end = offset + limit
    page = [key.key.to_url() for key, _ in held[offset:end]]
    return Chunks(chunks=page, next_offset=end if end < len(held) else None)


@router.post("/admin/evict", tags=["admin"], dependencies=[admin_role])
async def evict_memory(sidecar: RunningSidecar, request: EvictBytesRequest) -> EvictAnswer:
    """Free shared memory, coldest chunks first.

    Pinned chunks and those that engines use stay; slower tiers keep their copies.
    """
    return EvictAnswer(freed_bytes=await sidecar.stack.hot.evict(request.num_bytes))


@router.post("/admin/clear", tags=["admin"], dependencies=[admin_role])
async def clear_tiers(
    sidecar: RunningSidecar, request: ClearTiersRequest | None = None
) -> ClearAnswer:
    """Remove all chunks of this sidecar's own tiers, or of the named ones.

    It cannot be undone; peers and the remote tier keep their chunks. Pins of removed chunks end.
    Without a body: all of its own tiers.
    """
    tiers = None if request is None else request.tiers
    num_chunks = await sidecar.stack.clear(search_range=tiers or LOCAL_TIERS)
    await sidecar.pins.expire()
    return ClearAnswer(num_chunks=num_chunks)


@router.post("/admin/drain", tags=["admin"], dependencies=[admin_role])
async def drain(sidecar: RunningSidecar, wait: Wait = True) -> DrainAnswer:
    """Drain: accept no new chunks, finish writes, hand over what only this sidecar holds.

    Reads continue; engines' stores are refused and pins end. A call during a drain waits for that
    drain; after an incomplete one it tries again. With `wait=false` it answers once the number of
    chunks is known. The process keeps running, and `undrain` cancels the drain.
    """
    sidecar.drain.begin()
    await (sidecar.drain.run() if wait else sidecar.drain.counted())
    return _drain_answer(sidecar)


@router.post("/admin/undrain", tags=["admin"], dependencies=[admin_role], responses=failures(409))
async def undrain(sidecar: RunningSidecar) -> DrainAnswer:
    """Cancel a drain: accept chunks, pins and pulls again.

    One that the broker has ordered, too. Chunks that were handed over also stay there; earlier
    pins are gone. Does nothing without a drain. 409: the process is about to end.
    """
    await sidecar.undrain()
    return _drain_answer(sidecar)


def _drain_answer(sidecar: SidecarNode) -> DrainAnswer:
    return DrainAnswer(
        draining=sidecar.is_draining,
        settled=sidecar.is_settled,
        drain=DrainView.model_validate(sidecar.drain.progress),
    )
