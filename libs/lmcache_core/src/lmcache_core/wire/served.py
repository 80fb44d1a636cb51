"""What an lm:// server serves, to which clients, and within which limits."""

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
    """The store of a server. Failures of the store as a whole are raised as `UnavailableError`."""

    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        """Return memory for a payload being received, with one reference owned by the caller; None
        if there is no room.

        Args:
            num_bytes: Announced size; the payload may turn out smaller.
            tenant: The tenant that will store it; the memory counts against it.
        """

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which of these chunks exist."""

    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """Return chunks, with a reference each owned by the caller, or the reasons why they are
        missing. Called with at most `get_batch` keys.
        """

    async def put(self, chunk: Chunk) -> bool:
        """Store a whole, verified chunk (borrowed: take a reference to keep the memory). True: it
        is visible now.
        """

    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks and return how many were there."""


@runtime_checkable
class AdaptsToClients(Protocol):
    """A store that serves each client what that client accepts. Other stores serve the same to
    all.
    """

    def for_client(self, accepts: Accepts) -> ServedStore:
        """Return the store as seen by a client that accepts these records."""


@runtime_checkable
class TakesHandovers(Protocol):
    """A store that accepts chunks of any tenant from servers that shut down. Offered to callers for
    which `speaks_for_all_tenants` holds.
    """

    def stays(self, key: ChunkKey) -> bool:
        """Return whether the chunk, if it is here, will stay: for a server that shuts down, a chunk
        that another one is about to lose is as good as lost.
        """

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a record of that size fits without evicting another."""

    async def take_over(self, chunk: Chunk) -> bool:
        """Store a chunk like `ServedStore.put`, with the `stored_at` of the server that hands it
        over.
        """


@dataclass(frozen=True, slots=True)
class HandoverNote:
    """The chunks that a connection has handed over since the last such note.

    Attributes:
        caller: Owner of the token; None without a token.
        client: Address and port of the other side.
        tenants: Tenants of the chunks, or some of them.
        num_chunks: Chunks that were stored.
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
    """Summarises what one connection hands over: a server that shuts down hands over thousands of
    chunks. The first chunk is noted immediately, later ones once a minute, the rest at the end.

    Attributes:
        note: Receives the notes; None drops them.
        client: Address and port of the other side.
        clock: Seconds, monotonic.
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
            caller: Current owner of the connection.
            num_bytes: Size of its payload.
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
    """Bounds on what one client can make a server do.

    Attributes:
        max_connections: Concurrent connections; beyond it a new one is refused with `busy`, or
            takes the place of one of the tenant with the most. The roles that speak for all tenants
            share places of their own.
        max_strangers: Connections without a valid token or ticket so far; beyond it the oldest of
            them is closed. They do not count towards `max_connections`.
        max_handshakes: Concurrent TLS handshakes; beyond it a new connection is closed.
        max_in_flight: Concurrent requests of one connection; beyond it the connection is not read.
        max_batch: Keys in one request.
        max_blob_bytes: Longest record accepted.
        get_batch: Chunks of one GET that are referenced at a time.
        hello_timeout_s: Time from the connection to its HELLO.
        idle_timeout_s: Longest silence of a connection without requests.
        transfer_timeout_s: Time for the rest of a frame, read or written, in addition to the time
            that `min_bytes_per_s` allows.
        min_bytes_per_s: Slowest transfer of a blob.
        reauthenticate_s: How long an authenticated token may serve requests before it is checked
            again.
        admit: Admits one request of a tenant, or raises `CapacityError`; None: no limit.
        pace_s: Longest time that a HANDOVER waits for admission; a refused chunk may be lost.
        note_handovers: Receives notes of handovers, for an audit; None drops them.
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
        """Return the longest time for a frame with a blob of that size."""
        return self.transfer_timeout_s + num_bytes / self.min_bytes_per_s
