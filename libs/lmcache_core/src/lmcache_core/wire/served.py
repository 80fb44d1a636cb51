"""What an lm:// server serves, for whom, and within which limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Result
from lmcache_core.security import Principal, Ticket
from lmcache_core.security.handshakes import MAX_HANDSHAKES
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.frames import MAX_BLOB_BYTES
from lmcache_core.wire.messages import MAX_BATCH_KEYS

NOTE_INTERVAL_S: Final = 60.0
MAX_NOTED_TENANTS: Final = 16


class ServedStore(Protocol):
    """Where a server keeps chunks. Failures of the store as a whole are raised as
    `UnavailableError`.
    """

    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        """Return memory for a payload on its way in, one reference owned by the caller; None
        without room.

        Args:
            num_bytes: As announced; perhaps more than ever comes.
            tenant: The tenant that will store it; the memory counts against it.
        """

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which of them are there."""

    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """Return chunks, a reference each owned by the caller, or why they are missing. Called with
        at most `get_batch` keys.
        """

    async def put(self, chunk: Chunk) -> bool:
        """Keep a whole, verified chunk (borrowed: take a reference to keep the memory). True: it
        is visible now.
        """

    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; return how many were there."""


@runtime_checkable
class AdaptsToClients(Protocol):
    """Ability: a store that serves each client what that one can take. Without it all are served
    the same.
    """

    @property
    def offers(self) -> Accepts:
        """Return all that a client may be served if it can take it."""

    def for_client(self, accepts: Accepts) -> ServedStore:
        """Return the same store as a client that takes these records sees it."""


@runtime_checkable
class TakesHandovers(Protocol):
    """Ability: a store that takes over chunks, of any tenant, from servers that end. Offered to
    callers that `speaks_for_all_tenants` lets.
    """

    def stays(self, key: ChunkKey) -> bool:
        """Return whether it will keep that chunk if it has it: to a server that ends, what another
        is about to lose is as good as lost.
        """

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a record of that size can be kept without evicting another."""

    async def take_over(self, chunk: Chunk) -> bool:
        """Keep a chunk, as `ServedStore.put`, that was stored elsewhere at its `stored_at`."""


@dataclass(frozen=True, slots=True)
class HandoverNote:
    """What a connection has handed over since the last such note.

    Attributes:
        caller: Whose token was shown; None: no token was.
        client: Address and port of the other side.
        tenants: Whose chunks, or some of them.
        num_chunks: Chunks that were kept.
        num_bytes: Bytes of these.
        num_refused: Chunks that were not.
    """

    caller: Principal | None
    client: str
    tenants: tuple[str, ...]
    num_chunks: int
    num_bytes: int
    num_refused: int


Authenticate = Callable[[str | None], Principal]
Admit = Callable[[str], None]
VerifyTicket = Callable[[str], Ticket]
NoteHandovers = Callable[[HandoverNote], None]


@dataclass(slots=True)
class HandoverLog:
    """Count what one connection hands over: a server that ends hands over thousands of chunks. The
    first chunk is noted at once, what follows once a minute, the rest at the end.

    Attributes:
        note: Takes the notes; None drops them.
        client: Address and port of the other side.
        clock: Seconds that never go back.
    """

    note: NoteHandovers | None
    client: str
    clock: Callable[[], float] = time.monotonic
    _caller: Principal | None = None
    _tenants: set[str] = field(default_factory=set)
    _num_chunks: int = 0
    _num_bytes: int = 0
    _num_refused: int = 0
    _flushed_at: float = float("-inf")

    def add(self, caller: Principal | None, tenant: str, num_bytes: int, is_kept: bool) -> None:
        """Count a chunk.

        Args:
            caller: Whose connection it came by, as known now.
            tenant: In whose namespace it was to be put.
            num_bytes: Of its payload.
            is_kept: Whether it was.
        """
        self._caller = caller
        if len(self._tenants) < MAX_NOTED_TENANTS:
            self._tenants.add(tenant)
        self._num_chunks += is_kept
        self._num_bytes += num_bytes * is_kept
        self._num_refused += not is_kept
        if self.clock() - self._flushed_at >= NOTE_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Note what has been counted since the last note."""
        if self.note is not None and self._num_chunks + self._num_refused:
            counts = (self._num_chunks, self._num_bytes, self._num_refused)
            tenants = tuple(sorted(self._tenants))
            self.note(HandoverNote(self._caller, self.client, tenants, *counts))
        self._flushed_at = self.clock()
        self._tenants.clear()
        self._num_chunks = self._num_bytes = self._num_refused = 0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of what one client can make a server do.

    Attributes:
        max_connections: Connections at once; above it a newcomer is told `busy`.
        max_strangers: Connections that have shown neither a good token nor a good ticket yet; above
            it the oldest of them ends. They take none of `max_connections`.
        max_handshakes: TLS handshakes underway at once; above it a newcomer's connection ends.
        max_in_flight: Requests of one connection at once; above it the connection is not read.
        max_batch: Keys in one request.
        max_blob_bytes: Longest record that is taken.
        get_batch: Chunks of one GET that are referenced at once.
        hello_timeout_s: From the connection to its HELLO.
        idle_timeout_s: Longest silence of a connection without requests.
        transfer_timeout_s: For the rest of a frame, read or written, plus the time that
            `min_bytes_per_s` gives it.
        min_bytes_per_s: Slowest transfer of a blob.
        reauthenticate_s: How long an authenticated token may serve requests before it is checked
            again.
        admit: Takes one request of a tenant's, or raises `CapacityError`; None: as many as come.
        pace_s: Longest time that a HANDOVER waits to be admitted; what is refused may be lost.
        note_handovers: Takes notes of what connections hand over, for an audit; None drops them.
    """

    max_connections: int = 256
    max_strangers: int = 64
    max_handshakes: int = MAX_HANDSHAKES
    max_in_flight: int = 32
    max_batch: int = MAX_BATCH_KEYS
    max_blob_bytes: int = MAX_BLOB_BYTES
    get_batch: int = 4
    hello_timeout_s: float = 5.0
    idle_timeout_s: float = 300.0
    transfer_timeout_s: float = 10.0
    min_bytes_per_s: int = 1 << 20
    reauthenticate_s: float = 1.0
    admit: Admit | None = None
    pace_s: float = 2.0
    note_handovers: NoteHandovers | None = None

    def transfer_s(self, num_bytes: int) -> float:
        """Return the longest time that a frame with a blob of that size may take."""
        return self.transfer_timeout_s + num_bytes / self.min_bytes_per_s
