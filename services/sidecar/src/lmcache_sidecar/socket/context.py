"""What the sessions of a socket work with, and what they keep together."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.memory import SharedArena
from lmcache_core.sidecar import messages as m
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.staging import STAGED_SHARE, ChunkBudget
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.request_context import Tracer

from lmcache_sidecar.arena.extents import ReservedExtents, UnrecordedExtents
from lmcache_sidecar.descriptions import Descriptions
from lmcache_sidecar.socket.names import KeyMemo

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
        tenant: Namespace of this pod's chunks.
        arena_bytes: Size of the arena.

    Attributes:
        names: Keys that were read.
        room: What tickets of all clients may hold together.
        reserved: What reservations of all clients may hold together.
        pinned: What pins of all clients may hold together; a chunk that several pin counts once.
    """

    def __init__(self, tenant: str, arena_bytes: int) -> None:
        self.names = KeyMemo(tenant)
        self.room = ChunkBudget(arena_bytes // STAGED_SHARE)
        self.reserved = ReservationRoom(arena_bytes)
        self.pinned = ChunkBudget(arena_bytes - arena_bytes // KEPT_SHARE)
        self._greeted: list[m.Hello] = []

    def greet(self, hello: m.Hello) -> str | None:
        """Let a client in; `leave` follows. The processes of one engine (clients of one name) must
        agree on the layout of a model. Different engines never share chunks of different layouts,
        since the layout is part of a chunk's name. A client that names no layout is not compared.

        Returns:
            Why the client is refused; None when it is in.
        """
        for other in self._greeted:
            is_same_kv = (other.client, other.model, other.world_size) == (
                hello.client,
                hello.model,
                hello.world_size,
            )
            if is_same_kv and hello.layout and other.layout and hello.layout != other.layout:
                return (
                    f"client {hello.client!r}, model {hello.model!r}: layout {hello.layout!r}, but"
                    f" the client with pid {other.pid} has connected with layout {other.layout!r};"
                    " the processes of one engine must agree"
                )
        self._greeted.append(hello)
        return None

    def leave(self, hello: m.Hello) -> None:
        """Forget a client that was let in."""
        at = next(i for i, other in enumerate(self._greeted) if other is hello)
        del self._greeted[at]
