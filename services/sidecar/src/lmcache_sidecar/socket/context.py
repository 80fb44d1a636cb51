"""State shared by the sessions of a socket."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import LayoutError
from lmcache_core.memory import SharedArena
from lmcache_core.storage.byte_gate import ByteGate
from lmcache_core.storage.changes import ChangeLog
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.staging import STAGED_SHARE, ChunkBudget
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.request_context import RequestIds
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.telemetry.tracing import Tracer
from lmcache_core.wire.messages import EngineInfo

from lmcache_sidecar import metrics
from lmcache_sidecar.arena.journal import ArenaJournal
from lmcache_sidecar.descriptions import Descriptions
from lmcache_sidecar.recent_lookups import RecentLookups
from lmcache_sidecar.socket.encoded_readers import EncodedReaders

logger = logging.getLogger(__name__)

MAX_LARGE_REQUEST_BYTES = 64 << 20
KEPT_SHARE = 4
"""One part in this many of the arena is never reserved by clients: it is for chunks being
loaded.
"""


@dataclass
class SessionContext:
    """State shared by all sessions of a sidecar.

    Attributes:
        server: This sidecar's instance id.
        verify_hot: Which loads clients verify.
        salt: Sent to every client.
        timeout_s: Longest wait for the tiers in a lookup.
        tasks: Owner of background lifts.
        counters: Counters of engines' requests and results, under the names of
            `lmcache_sidecar.metrics`.
        changes: Names chunks that have come or gone.
        journal: Records what is lent to clients; None: the next start uses a new arena, so late
            writes to this one do no harm.
        readers: What clients decode; None: no tier has encoded records.
        request_ids: Generates ids for requests that came without one.
        large_requests: Bounds the memory of large requests, from their first byte until they are
            answered.
        log: Logs events that clients can cause arbitrarily often.
        is_draining: Whether stores from clients are refused.
        staged: Limit on what tickets of all clients hold together.
        pinned: Limit on what pins of all clients hold together; a chunk pinned several times counts
            once.
        max_reserved_bytes: Limit on what reservations of all clients hold together.
        reserved_bytes: What they hold.
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
    changes: ChangeLog
    journal: ArenaJournal | None = None
    tracer: Tracer | None = None
    readers: EncodedReaders | None = None
    descriptions: Descriptions = field(default_factory=Descriptions)
    request_ids: RequestIds = field(default_factory=RequestIds)
    log: SparseLog = field(default_factory=lambda: SparseLog(logger))
    is_draining: bool = False
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        self.large_requests = ByteGate(MAX_LARGE_REQUEST_BYTES)
        self.max_reserved_bytes = self.arena.size - self.arena.size // KEPT_SHARE
        self.staged = ChunkBudget(self.arena.size // STAGED_SHARE)
        self.pinned = ChunkBudget(self.max_reserved_bytes)
        self._models: set[str] = set()
        self.lookups = RecentLookups(self.stack.hot, self.tenant)
        self._greeted: list[EngineInfo] = []

    def model_label(self, model_name: str) -> str:
        """Return the label under which a model's work is counted: clients may name any number of
        models.
        """
        if model_name not in self._models and len(self._models) >= metrics.MAX_MODELS - 1:
            return metrics.OTHER_MODEL
        self._models.add(model_name)
        return model_name

    def greet(self, engine: EngineInfo) -> None:
        """Admit a client, to be followed by `leave`. The processes of one engine (clients with the
        same name) must agree on the layout of a model. Different engines never share chunks of
        different layouts, since the layout is part of a chunk's name. A client that states no
        layout is not compared.

        Raises:
            LayoutError: They disagree.
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
        """Forget a client that was admitted."""
        self._greeted = [other for other in self._greeted if other is not engine]
