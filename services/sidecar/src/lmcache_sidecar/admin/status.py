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
from lmcache_servicekit.problems import failures
from lmcache_servicekit.state import version_of
from pydantic import BaseModel, ConfigDict, Field

from lmcache_sidecar.sidecar import RunningSidecar, SidecarNode

MAX_PAGE = 1000

LocalTier = Literal["Hot", "LocalDiskBackend"]


class RecoveryView(BaseModel):
    """Chunks that an earlier start left in shared memory."""

    model_config = ConfigDict(from_attributes=True)

    is_over: bool
    found_chunks: int = Field(description="Chunks in memory when this process started")
    checked_chunks: int = Field(description="Of these, chunks whose digest has been verified")
    recovered_chunks: int = Field(description="Chunks that are served again")
    damaged_chunks: int = Field(description="Chunks whose content had changed")
    dropped_chunks: int = Field(
        description="Chunks that were too old, over a quota, or stored again since"
    )


class ArenaView(BaseModel):
    """Shared memory across restarts of the sidecar."""

    model_config = ConfigDict(from_attributes=True)

    is_recorded: bool = Field(description="Whether the next start will find what is in memory now")
    huge_pages: bool = Field(description="Whether the kernel was asked for huge pages")
    lent_bytes: int = Field(
        description="Memory that clients of earlier starts may still write to; not in use"
    )
    recovery: RecoveryView


class Status(BaseModel):
    """The sidecar at a glance."""

    instance: str
    version: str
    uptime_s: float
    distributed_url: str
    generation: str
    arena_bytes: int
    arena: ArenaView
    verify_hot: str
    accepts_handover: bool = Field(description="Whether peers may hand over chunks now")
    draining: bool
    drain: DrainView
    num_clients: int
    registered: bool | None = Field(
        description="Whether lookup and broker know this sidecar; null: neither is configured"
    )
    settled: bool = Field(
        description="Whether everything stored has reached the slower tiers and lookup"
    )
    pending_bytes: int = Field(description="Bytes waiting to be written to slower tiers")
    reserved_bytes: int = Field(description="Arena memory that engines are filling")
    held_bytes: int = Field(description="Arena memory held for engines: pinned or staged")
    pinned_bytes: int = Field(description="Arena memory pinned by operators (`POST /v1/admin/pin`)")


class Description(BaseModel):
    """How a client names KV."""

    model_config = ConfigDict(from_attributes=True)

    fmt: str
    model_name: str
    world_size: int
    chunk_size: int
    groups: list[str]


class ClientStatus(BaseModel):
    """One client of the socket."""

    client: str
    pid: int
    rank: int
    world_size: int
    model: str
    num_reservations: int
    reserved_bytes: int
    num_pins: int
    pinned_bytes: int
    num_tickets: int
    descriptions: list[Description]


class Clients(BaseModel):
    """Connected clients."""

    clients: list[ClientStatus]


class Tiers(BaseModel):
    """Figures by tier."""

    tiers: dict[str, dict[str, int]]


class Chunks(BaseModel):
    """A page of the chunks in shared memory."""

    chunks: list[str] = Field(description="Keys in their URL form")
    next_offset: int | None


class ClearTiersRequest(BaseModel):
    """The tiers to clear."""

    model_config = ConfigDict(extra="forbid")

    tiers: list[LocalTier] | None = Field(
        None, min_length=1, description="If absent, all tiers of this pod"
    )


router = APIRouter(prefix="/v1", route_class=GuardedRoute)
client_role = Depends(RoleRequired("client"))
admin_role = Depends(RoleRequired("admin"))


@router.get("/status", tags=["status"], dependencies=[client_role])
async def get_status(sidecar: RunningSidecar) -> Status:
    """Show a summary."""
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
    """Show figures by tier."""
    return Tiers(tiers=sidecar.stack.stats())


@router.get("/clients", tags=["status"], dependencies=[client_role])
async def list_clients(sidecar: RunningSidecar) -> Clients:
    """List clients connected to the socket."""
    return Clients(
        clients=[
            ClientStatus(
                client=session.engine.name,
                pid=session.engine.pid,
                rank=session.engine.rank,
                world_size=session.engine.world_size,
                model=session.engine.model,
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
    """List chunks in shared memory."""
    keys = await asyncio.to_thread(sidecar.stack.hot.keys)
    end = offset + limit
    page = [key.key.to_url() for key in keys[offset:end]]
    return Chunks(chunks=page, next_offset=end if end < len(keys) else None)


@router.post("/admin/evict", tags=["admin"], dependencies=[admin_role])
async def evict_memory(sidecar: RunningSidecar, request: EvictBytesRequest) -> EvictAnswer:
    """Free shared memory, coldest chunks first."""
    return EvictAnswer(freed_bytes=await sidecar.stack.hot.evict(request.num_bytes))


@router.post("/admin/clear", tags=["admin"], dependencies=[admin_role])
async def clear_tiers(
    sidecar: RunningSidecar, request: ClearTiersRequest | None = None
) -> ClearAnswer:
    """Remove all chunks of this sidecar's own tiers, or of the named ones."""
    tiers = None if request is None else request.tiers
    num_chunks = await sidecar.stack.clear(search_range=tiers or LOCAL_TIERS)
    await sidecar.pins.expire()
    return ClearAnswer(num_chunks=num_chunks)


@router.post("/admin/drain", tags=["admin"], dependencies=[admin_role])
async def drain(sidecar: RunningSidecar, wait: Wait = True) -> DrainAnswer:
    """Drain: accept no new chunks, finish writes, hand over what only this sidecar holds.

    Reads continue. Answers when done or after `drain_timeout_s`; with `wait=false` immediately.
    """
    sidecar.drain.begin()
    await (sidecar.drain.run() if wait else sidecar.drain.counted())
    return _drain_answer(sidecar)


@router.post("/admin/undrain", tags=["admin"], dependencies=[admin_role], responses=failures(409))
async def undrain(sidecar: RunningSidecar) -> DrainAnswer:
    """Cancel a drain: accept chunks, pins and pulls again. Chunks that were handed over stay there.

    409 while the process ends.
    """
    await sidecar.undrain()
    return _drain_answer(sidecar)


def _drain_answer(sidecar: SidecarNode) -> DrainAnswer:
    return DrainAnswer(
        draining=sidecar.is_draining,
        settled=sidecar.is_settled,
        drain=DrainView.model_validate(sidecar.drain.progress),
    )
