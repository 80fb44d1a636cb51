"""What all sessions of a sidecar work with."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.memory import SharedArena
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.request_context import Tracer

from lmcache_sidecar.arena.extents import ReservedExtents, UnrecordedExtents
from lmcache_sidecar.descriptions import Descriptions


@dataclass(frozen=True)
class SessionContext:
    """What all sessions of a sidecar share.

    Attributes:
        stack: The tiers.
        arena: The shared arena.
        server: This sidecar's instance id.
        tenant: Namespace of this pod's chunks.
        verify_hot: What clients are to verify.
        salt: Handed to every client.
        timeout_s: Longest wait on the tiers for a lookup.
        tasks: Owner of background lifts.
        counters: What engines asked for and got, under the names of `lmcache_sidecar.metrics`.
        extents: Hears of what clients are lent.
        descriptions: Hears how clients name KV.
        tracer: Traces requests; None: nobody does.
    """

    stack: TierStack
    arena: SharedArena
    server: str
    tenant: str
    verify_hot: str
    salt: str
    timeout_s: float
    tasks: TaskSupervisor
    counters: Counters
    extents: ReservedExtents = field(default_factory=UnrecordedExtents)
    descriptions: Descriptions = field(default_factory=Descriptions)
    tracer: Tracer | None = None
