"""What the sessions of a socket work with, and what they keep together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import LayoutError
from lmcache_core.memory import SharedArena
from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.staging import STAGED_SHARE, ChunkBudget
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.request_context import RequestIds
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.telemetry.tracing import Tracer
from lmcache_core.wire.messages import EngineInfo

from lmcache_sidecar.arena.extents import ReservedExtents, UnrecordedExtents
from lmcache_sidecar.descriptions import Descriptions

logger = logging.getLogger(__name__)

MAX_LARGE_REQUEST_BYTES = 64 << 20
KEPT_SHARE = 4
"""One part in this many of the arena is not reserved by all clients together: it is for chunks
that are loaded.
"""


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
        tracer: Traces requests; None: no traces.
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


class ReservationRoom:
    """What reservations of all clients may hold together.

    Args:
        arena_bytes: Size of the arena.

    Attributes:
        used_bytes: What they hold.
    """

    def __init__(self, arena_bytes: int) -> None:
        self._max_bytes = arena_bytes - arena_bytes // KEPT_SHARE
        self.used_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Whether so many more fit; they count from now on."""
        if self.used_bytes + num_bytes > self._max_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """So many are reserved no more."""
        self.used_bytes -= num_bytes


class SharedState:
    """What the sessions of one socket keep together.

    Args:
        arena_bytes: Size of the arena.

    Attributes:
        request_ids: Names for requests that came without one.
        large_requests: Bounds the memory of large requests, from their first byte until they are
            answered.
        log: For lines that clients can cause as often as they like.
        is_draining: Whether no client can store any more.
        room: What tickets of all clients may hold together.
        reserved: What reservations of all clients may hold together.
        pinned: What pins of all clients may hold together; a chunk that several pin counts once.
    """

    def __init__(self, arena_bytes: int) -> None:
        self.request_ids = RequestIds()
        self.large_requests = ByteGate(MAX_LARGE_REQUEST_BYTES)
        self.log = SparseLog(logger)
        self.is_draining = False
        self.room = ChunkBudget(arena_bytes // STAGED_SHARE)
        self.reserved = ReservationRoom(arena_bytes)
        self.pinned = ChunkBudget(arena_bytes - arena_bytes // KEPT_SHARE)
        self._greeted: list[EngineInfo] = []

    def greet(self, engine: EngineInfo) -> None:
        """Let a client in; `leave` follows. The processes of one engine (clients of one name) must
        agree on the layout of a model. Different engines never share chunks of different layouts,
        since the layout is part of a chunk's name. A client that names no layout is not compared.

        Raises:
            LayoutError: They do not agree.
        """
        for other in self._greeted:
            is_same_kv = (other.name, other.model, other.world_size) == (
                engine.name,
                engine.model,
                engine.world_size,
            )
            if is_same_kv and engine.layout and other.layout and engine.layout != other.layout:
                raise LayoutError(
                    f"client {engine.name!r}, model {engine.model!r}: layout {engine.layout!r}, but"
                    f" the client with pid {other.pid} has connected with layout {other.layout!r};"
                    " the processes of one engine must agree"
                )
        self._greeted.append(engine)

    def leave(self, engine: EngineInfo) -> None:
        """Forget a client that was let in."""
        at = next(i for i, other in enumerate(self._greeted) if other is engine)
        del self._greeted[at]
