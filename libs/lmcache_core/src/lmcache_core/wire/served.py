"""What an lm:// server serves, for whom, and within which limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Result
from lmcache_core.security.handshakes import MAX_HANDSHAKES
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.frames import MAX_BLOB_BYTES
from lmcache_core.wire.messages import MAX_BATCH_KEYS


class ServedStore(Protocol):
    """Where a server keeps chunks. Failures of the store as a whole are raised as
    `UnavailableError`.
    """

    def allocate(self, num_bytes: int, tenant: str) -> MemoryObj | None:
        """Memory for a payload on its way in, one reference owned by the caller; None when there is
        no room.

        Args:
            num_bytes: As announced; perhaps more than ever comes.
            tenant: The tenant that will store it; the memory counts against it.
        """

    async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of them are there."""

    async def get(self, keys: Sequence[ChunkKey]) -> list[Result]:
        """Chunks, a reference each owned by the caller, or why they are missing. Called with at
        most `get_batch` keys.
        """

    async def put(self, chunk: Chunk) -> bool:
        """Keep a whole, verified chunk (borrowed: take a reference to keep the memory). True: it
        is visible now.
        """

    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; the number that were there."""


@runtime_checkable
class AdaptsToClients(Protocol):
    """Ability: a store that serves each client what that one can take. Without it all are served
    the same.
    """

    @property
    def offers(self) -> Accepts:
        """All that a client may be served if it can take it."""

    def for_client(self, accepts: Accepts) -> ServedStore:
        """The same store, as a client sees it that can take these records."""


@runtime_checkable
class TakesHandovers(Protocol):
    """Ability: a store that takes over chunks, of any tenant, from servers that end. Offered to
    callers that `speaks_for_all_tenants` lets.
    """

    def stays(self, key: ChunkKey) -> bool:
        """Whether it will keep that chunk if it has it: to a server that ends, what another one
        is about to lose is as good as lost.
        """

    def has_room(self, num_bytes: int) -> bool:
        """Whether a record of that size can be kept without giving up another."""

    async def take_over(self, chunk: Chunk) -> bool:
        """Like `ServedStore.put`, for a chunk that has been stored elsewhere at its `stored_at`."""


@runtime_checkable
class HasRole(Protocol):
    """Ability: an authenticated caller that may be more than a client."""

    @property
    def role(self) -> str:
        """`admin`, `storage`, or less."""


class HasTenant(Protocol):
    """An authenticated caller, for example a `Principal`."""

    @property
    def tenant(self) -> str:
        """Namespace of all that the caller stores and reads."""


class PullTicket(Protocol):
    """A verified ticket, for example a `Ticket`."""

    @property
    def tenant(self) -> str:
        """The only namespace that may be read."""

    @property
    def requester(self) -> str:
        """Name that the client gives in its HELLO."""


@dataclass(frozen=True, slots=True)
class HandoverNote:
    """What a connection has handed over since the last such note.

    Attributes:
        caller: Who did; None: somebody without a token.
        client: Address and port of the other side.
        tenants: Whose chunks, or some of them.
        num_chunks: Chunks that were kept.
        num_bytes: Bytes of these.
        num_refused: Chunks that were not.
    """

    caller: HasTenant | None
    client: str
    tenants: tuple[str, ...]
    num_chunks: int
    num_bytes: int
    num_refused: int


Authenticate = Callable[[str | None], HasTenant]
Admit = Callable[[str], None]
VerifyTicket = Callable[[str], PullTicket]
NoteHandovers = Callable[[HandoverNote], None]


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
        reauthenticate_s: How old the knowledge may be of who is behind a token when a request is
            served.
        admit: Takes one request of a tenant's, or raises `CapacityError`; None: as many as come.
        pace_s: Longest time that a HANDOVER waits to be admitted; what is refused may be lost.
        note_handovers: Is told of what connections hand over, for an audit; None: nobody is.
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
        """Longest time that a frame with a blob of that size may take."""
        return self.transfer_timeout_s + num_bytes / self.min_bytes_per_s


@dataclass(frozen=True, slots=True)
class LmService:
    """What the sessions of one lm:// server share.

    Attributes:
        store: Where chunks are; may be one that `AdaptsToClients`.
        authenticate: Maps HELLO's token to who it belongs to, or raises `AuthenticationError`.
        verify_ticket: Checks the ticket of a GET; with it, a connection without a good token may
            still GET.
        limits: Bounds.
        name: What HELLO_OK calls this server.
        log: For lines that clients can cause as often as they like.
    """

    store: ServedStore
    authenticate: Authenticate
    verify_ticket: VerifyTicket | None
    limits: ServerLimits
    name: str
    log: SparseLog
