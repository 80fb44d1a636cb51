"""The MessagePack part of each frame type, as structs whose every field is bounded.

Messages from HELLO on belong to one agreed version, so that surplus fields are refused; HELLO,
HELLO_OK and ERROR, which cross versions, ignore them. Frames from RESERVE on are about a sidecar's
arena, and are spoken on its Unix socket only.

Source: `docs/protocols.md`, "lm://" and "Sidecar socket". Golden vectors:
`tests/contract/golden/frames.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from lmcache_core.errors import (
    AuthenticationError,
    CapacityError,
    IdentityError,
    LayoutError,
    LMCacheError,
    ProtocolError,
    VersionError,
)
from lmcache_core.keys import CHUNK_HASH_BYTES, MAX_CANONICAL_KEY_BYTES, ChunkChain, Lane
from lmcache_core.names import TENANT_PATTERN
from lmcache_core.telemetry.request_context import MAX_REQUEST_ID_CHARS, MAX_TRACEPARENT_CHARS
from lmcache_core.wire.frames import FrameHeader, FrameType, build_header

VERSION_MIN = 1
VERSION_MAX = 2
VERSION_LEND = 2
"""The first one with LEND and GIVE_BACK."""
MAX_BATCH_KEYS = 128
MAX_LANES = 256
"""Lanes per connection; keys of further lanes are spelled out in full."""
MAX_TOKEN_CHARS = 512
MAX_TICKET_CHARS = 4096
MAX_NAME_CHARS = 128
MAX_CAPABILITIES = 32
MAX_ERROR_CHARS = 512
MAX_AGE_MS = (1 << 53) - 1
ANY_SERVER = "lmcache"
"""Name in HELLO_OK of a server without one of its own."""
MAX_NAMES = 4096
"""Names, extents or tickets in one frame about the arena, except STAGE."""
MAX_CHAINS = 16
MAX_STAGE_KEYS = 64 << 10
"""Chunks times ranks, over all chains of one STAGE."""
MAX_RANKS = 1024
"""Cache groups of one engine; a chunk has one key for each."""
MAX_TICKET_NAME_CHARS = 128
MAX_SOURCE_CHARS = 253
MAX_RECOMPUTE_US = 3_600_000_000

_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Capabilities = Annotated[list[_Name], Meta(max_length=MAX_CAPABILITIES)]
_Version = Annotated[int, Meta(ge=0, le=65535)]
_Index = Annotated[int, Meta(ge=0, lt=MAX_BATCH_KEYS)]
_Tenant = Annotated[str, Meta(pattern=rf"^{TENANT_PATTERN}$(?!\n)", max_length=63)]
_LaneNumber = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
NameRun = tuple[_LaneNumber | None, Annotated[bytes, Meta(max_length=MAX_CANONICAL_KEY_BYTES)]]
"""A run of chunk names: a lane's number and the packed hashes, `CHUNK_HASH_BYTES` each. Without a
number, one canonical key of a chunk whose hash is not 32 bytes or whose lane got no number.
"""
_NameRuns = Annotated[list[NameRun], Meta(max_length=MAX_BATCH_KEYS)]
_ManyRuns = Annotated[
    list[
        tuple[_LaneNumber | None, Annotated[bytes, Meta(max_length=MAX_NAMES * CHUNK_HASH_BYTES)]]
    ],
    Meta(max_length=MAX_NAMES),
]
_Text = Annotated[str, Meta(max_length=1024)]
_Head = Annotated[bytes, Meta(max_length=64 << 10)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Size = Annotated[int, Meta(gt=0, le=4 << 30)]
_Deadline = Annotated[int, Meta(ge=1, le=3_600_000)]
_RecomputeTime = Annotated[int, Meta(ge=0, le=MAX_RECOMPUTE_US)]
_Handles = Annotated[tuple[_Count, ...], Meta(max_length=MAX_NAMES)]
_TicketName = Annotated[str, Meta(min_length=1, max_length=MAX_TICKET_NAME_CHARS)]
_StagedRun = tuple[
    _LaneNumber, Annotated[bytes, Meta(max_length=MAX_STAGE_KEYS * CHUNK_HASH_BYTES)]
]


class ErrorCode(StrEnum):
    """The cause in an ERROR frame."""

    VERSION = "version"
    AUTHENTICATION = "authentication"
    PROTOCOL = "protocol"
    BUSY = "busy"
    BAD_REQUEST = "bad_request"
    UNAVAILABLE = "unavailable"
    LAYOUT = "layout"


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The meta of a frame. Fields that a later version adds are ignored."""

    frame_type: ClassVar[FrameType]


class StrictMessage(Message, frozen=True, forbid_unknown_fields=True):
    """The meta of a frame of the agreed version: surplus fields are refused."""


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """A process that connects to a sidecar, for status pages and layout checks.

    Attributes:
        name: Name of the engine, the same for all of its processes.
        pid: Process id, in the client's own namespace.
        rank: The part of the KV that it handles.
        layout: Fingerprint of the KV's layout, "" for none.
    """

    name: _Text
    pid: _Count
    rank: _Count
    model: _Text
    layout: _Text
    world_size: _Count = 1


class ArenaInfo(msgspec.Struct, frozen=True, array_like=True):
    """Location and use of a sidecar's arena.

    Attributes:
        path: The file to map.
        generation: The sidecar's generation, whose lock the client takes.
        verify_hot: Which loads a client verifies.
        salt: Part of the names of chunks.
    """

    path: _Text
    num_bytes: _Count
    generation: _Count
    verify_hot: _Text
    salt: _Text


class Hello(Message, frozen=True):
    """Opens a connection.

    Attributes:
        capabilities: Names of what the client takes; see `lmcache_core.wire.capabilities`.
        token: Bearer token, nil without one.
        client: Name of the client, for logs and for comparison with tickets.
        engine: Description of the client, on a sidecar's socket.
    """

    frame_type = FrameType.HELLO
    version_min: _Version
    version_max: _Version
    capabilities: _Capabilities
    token: Annotated[str, Meta(max_length=MAX_TOKEN_CHARS)] | None
    client: _Name
    engine: EngineInfo | None = None


class HelloOk(Message, frozen=True):
    """Accepts a connection.

    Attributes:
        server: Name of the server: its instance id, or `ANY_SERVER`.
        max_batch: Largest number of keys in one request.
        arena: The arena for exchanging chunks, on a sidecar's socket.
    """

    frame_type = FrameType.HELLO_OK
    version: _Version
    server: _Name
    max_batch: Annotated[int, Meta(ge=1, le=MAX_NAMES)]
    arena: ArenaInfo | None = None


class Contains(StrictMessage, frozen=True):
    """Asks which chunks exist."""

    frame_type = FrameType.CONTAINS
    names: _NameRuns


class ContainsOk(StrictMessage, frozen=True):
    """Answers CONTAINS, HELD, LOOKUP and COMMIT, in the order of the names or extents."""

    frame_type = FrameType.CONTAINS_OK
    present: Annotated[list[bool], Meta(max_length=MAX_NAMES)]


class Get(StrictMessage, frozen=True):
    """Requests chunks.

    Attributes:
        prefix_only: Stop at the first missing chunk.
        ticket: A broker's ticket, nil without one.
    """

    frame_type = FrameType.GET
    names: _NameRuns
    prefix_only: bool
    ticket: Annotated[str, Meta(max_length=MAX_TICKET_CHARS)] | None


class ChunkHead(StrictMessage, frozen=True):
    """Announces the record in the blob: the answer to the key with that index."""

    frame_type = FrameType.CHUNK
    index: _Index


class GetEnd(StrictMessage, frozen=True):
    """Ends the answer to GET: `(index, reason)` for each chunk that was not sent."""

    frame_type = FrameType.GET_END
    misses: Annotated[list[tuple[_Index, _Name]], Meta(max_length=MAX_BATCH_KEYS)]


class Lend(StrictMessage, frozen=True):
    """Asks to keep chunks where they are, for the client's mover to read, until GIVE_BACK.
    Answered by LENT.

    Attributes:
        ticket: As in GET.
    """

    frame_type = FrameType.LEND
    names: _NameRuns
    ticket: Annotated[str, Meta(max_length=MAX_TICKET_CHARS)] | None


class Loan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk that is kept where it is.

    Attributes:
        id: Its id on this connection.
        address: Where its payload lies in the memory of the server's mover.
        head: The head of its record, which states the payload's length.
    """

    id: _Count
    address: _Count
    head: _Head


class Lent(StrictMessage, frozen=True):
    """Answers LEND.

    Attributes:
        mover: How movers reach the server's; empty: it has none at the moment.
        items: For each chunk the loan, or why there is none: the reason of a miss, or "" if GET
            has it.
    """

    frame_type = FrameType.LENT
    mover: Annotated[bytes, Meta(max_length=64 << 10)]
    items: Annotated[tuple[Loan | _Name, ...], Meta(max_length=MAX_BATCH_KEYS)]


class GiveBack(StrictMessage, frozen=True):
    """Ends loans. Answered by PONG."""

    frame_type = FrameType.GIVE_BACK
    loans: Annotated[tuple[_Count, ...], Meta(max_length=MAX_BATCH_KEYS)]


class Put(StrictMessage, frozen=True):
    """Announces the record in the blob, to be stored."""

    frame_type = FrameType.PUT


class HandoverChunk(StrictMessage, frozen=True):
    """Announces the record in the blob, which a server that shuts down hands over to another one.
    Answered by PUT_OK.

    Attributes:
        age_ms: Time since it was stored.
        may_evict: Whether others may be evicted for it; otherwise it is accepted only if there is
            room.
    """

    frame_type = FrameType.HANDOVER
    tenant: _Tenant
    age_ms: Annotated[int, Meta(ge=0, le=MAX_AGE_MS)]
    may_evict: bool


class Held(StrictMessage, frozen=True):
    """Asks which chunks of a tenant are here to stay. Answered by CONTAINS_OK."""

    frame_type = FrameType.HELD
    tenant: _Tenant
    names: _NameRuns


class PutOk(StrictMessage, frozen=True):
    """Answers PUT and HANDOVER: whether the store now holds the chunk and, if not, why."""

    frame_type = FrameType.PUT_OK
    stored: bool
    reason: _Name


class Remove(StrictMessage, frozen=True):
    """Requests the removal of chunks."""

    frame_type = FrameType.REMOVE
    names: _NameRuns


class RemoveOk(StrictMessage, frozen=True):
    """Answers REMOVE: how many chunks were there."""

    frame_type = FrameType.REMOVE_OK
    count: Annotated[int, Meta(ge=0, le=MAX_BATCH_KEYS)]


class Ping(StrictMessage, frozen=True):
    """Checks that the server responds."""

    frame_type = FrameType.PING


class Pong(StrictMessage, frozen=True):
    """Answers PING."""

    frame_type = FrameType.PONG


class DeclareLane(StrictMessage, frozen=True):
    """Assigns a number to a lane, for names in later requests on this connection. Has no answer.

    Attributes:
        number: 0 for the connection's first lane, then the next number.
    """

    frame_type = FrameType.LANE
    number: _LaneNumber
    lane: Lane


class Context(Message, frozen=True):
    """Identifies the request that the next frame belongs to, for logs and traces. Has no answer.

    Attributes:
        request_id: "" for none.
        traceparent: In the W3C's format, "" for none.
    """

    frame_type = FrameType.CONTEXT
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID_CHARS)]
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT_CHARS)]


class ErrorMessage(Message, frozen=True):
    """Refuses a request, or with correlation id 0 the connection.

    Attributes:
        code: One of `ErrorCode`, or one of a later version.
        message: Text for people.
    """

    frame_type = FrameType.ERROR
    code: _Name
    message: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]

    @classmethod
    def about(cls, exc: LMCacheError) -> ErrorMessage:
        """Return the frame that reports a refusal."""
        match exc:
            case VersionError():
                code = ErrorCode.VERSION
            case ProtocolError():
                code = ErrorCode.PROTOCOL
            case AuthenticationError():
                code = ErrorCode.AUTHENTICATION
            case IdentityError():
                code = ErrorCode.BAD_REQUEST
            case LayoutError():
                code = ErrorCode.LAYOUT
            case CapacityError():
                code = ErrorCode.BUSY
            case _:
                code = ErrorCode.UNAVAILABLE
        return cls(code.value, str(exc)[:MAX_ERROR_CHARS])


class ReserveExtents(StrictMessage, frozen=True):
    """Requests arena memory for chunks to be stored. Answered by EXTENTS.

    Attributes:
        sizes: Size of each in bytes.
        names: Their names: a chunk that is already in the arena gets no memory. May be empty.
    """

    frame_type = FrameType.RESERVE
    sizes: Annotated[tuple[_Size, ...], Meta(max_length=MAX_NAMES)]
    names: _ManyRuns = []


class Extent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of the arena, lent to the connection until COMMIT or DONE.

    Attributes:
        id: Its id on this connection.
        length: Its length in bytes.
        tier: For a load, the tier that the chunk came from.
        head: For a load, the head of the chunk's record.
    """

    id: int
    offset: int
    length: int
    tier: _Text = ""
    head: _Head = b""


class Extents(StrictMessage, frozen=True):
    """Answers RESERVE: for each chunk memory to fill, or the reason why there is none. Answers
    LOAD: the longest prefix of the chunks, then the reason why the next one is missing, if any is.
    """

    frame_type = FrameType.EXTENTS
    items: Annotated[tuple[Extent | _Text, ...], Meta(max_length=MAX_NAMES)]


class Commit(StrictMessage, frozen=True):
    """Reports that extents are filled: `(id, head)` each; the head names the chunk. The extents no
    longer belong to the client. Answered by CONTAINS_OK: whether each chunk is visible now.
    """

    frame_type = FrameType.COMMIT
    items: Annotated[tuple[tuple[_Count, _Head], ...], Meta(max_length=MAX_NAMES)]


class LoadExtents(StrictMessage, frozen=True):
    """Requests that chunks be brought into the arena and kept there until DONE. Answered by
    EXTENTS.

    Attributes:
        deadline_ms: Longest wait for slower tiers.
        recompute_us: Cost of computing one chunk, microseconds, 0 if unknown: loading may take no
            longer than that for each chunk that is not in the arena yet.
    """

    frame_type = FrameType.LOAD
    names: _ManyRuns
    deadline_ms: _Deadline
    recompute_us: _RecomputeTime


class Stage(StrictMessage, frozen=True):
    """Asks which of these chunks are in the arena for all ranks, to be held for the ticket from now
    on; the rest is lifted. Answered by PROMISE. Capability `stage`.

    Sent again with the same ticket, it polls the progress of the lift; `chains` may then be empty.
    Other chains under the same ticket are a new question.

    Attributes:
        ticket: Name of the question.
        chains: `(lane, hashes)` each: the chunks of all ranks of that lane.
        is_prefix: Ignore everything after the first missing chunk of a chain.
        deadline_ms: Longest time for a lift.
        recompute_us: As in LOAD.
    """

    frame_type = FrameType.STAGE
    ticket: _TicketName
    chains: Annotated[tuple[_StagedRun, ...], Meta(max_length=MAX_CHAINS)]
    is_prefix: bool
    deadline_ms: _Deadline
    recompute_us: _RecomputeTime


class Expect(Stage, frozen=True):
    """Asks as STAGE does about chunks that another engine has just computed: missing ones are
    waited for, for a moment. Answered by PROMISE.

    Attributes:
        source: Id or host of the instance that has them, or will; empty: unknown.
    """

    frame_type = FrameType.EXPECT
    source: Annotated[str, Meta(max_length=MAX_SOURCE_CHARS)]


class Promise(StrictMessage, frozen=True):
    """Answers STAGE: for each chain one byte per chunk (`StagedFrom`; 0: not there). `is_ready`:
    nothing more will come.
    """

    frame_type = FrameType.PROMISE
    is_ready: bool
    tiers: Annotated[tuple[bytes, ...], Meta(max_length=MAX_CHAINS)]


class DoneWith(StrictMessage, frozen=True):
    """Returns extents, filled or not, and releases what tickets hold. Answered by OK."""

    frame_type = FrameType.DONE
    extents: _Handles = ()
    tickets: Annotated[tuple[_TicketName, ...], Meta(max_length=MAX_NAMES)] = ()


class Ok(StrictMessage, frozen=True):
    """Answers DONE, REJECT, DESCRIBE and PREFETCH."""

    frame_type = FrameType.OK


class Reject(StrictMessage, frozen=True):
    """Reports that the bytes of these loaded chunks do not match their digests, for the sidecar to
    verify itself. The extents stay. Answered by OK. Capability `reject`.
    """

    frame_type = FrameType.REJECT
    extents: _Handles


class Describe(StrictMessage, frozen=True):
    """Describes how this client names KV, so that the sidecar's admin API can name the chunks of
    token ids. Answered by OK. Capability `describe`.
    """

    frame_type = FrameType.DESCRIBE
    fmt: _Text
    model_name: _Text
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    chunk_size: Annotated[int, Meta(ge=1, lt=1 << 32)]
    root: Annotated[bytes, Meta(min_length=CHUNK_HASH_BYTES, max_length=CHUNK_HASH_BYTES)]
    groups: Annotated[tuple[_Text, ...], Meta(min_length=1, max_length=MAX_CHAINS)]


class Lookup(StrictMessage, frozen=True):
    """Asks which chunks are cached in these tiers ([]: in any). Answered by CONTAINS_OK.

    A tier that has not answered after `deadline_ms`, or after the sidecar's own limit, counts as
    empty.
    """

    frame_type = FrameType.LOOKUP
    names: _ManyRuns
    tiers: Annotated[tuple[_Text, ...], Meta(max_length=16)]
    deadline_ms: _Deadline


class Prefetch(StrictMessage, frozen=True):
    """Requests that these chunks be lifted into the arena in the background. Answered by OK."""

    frame_type = FrameType.PREFETCH
    names: _ManyRuns


class Watch(StrictMessage, frozen=True):
    """Asks which chunks of the tenant have come or gone, in any local tier, since an earlier
    answer. Answered by CHANGES.

    Attributes:
        log: `Changes.log` of that answer; 0 for the first question.
        place: Its `Changes.place`.
    """

    frame_type = FrameType.WATCH
    log: _Count = 0
    place: _Count = 0


class Changes(StrictMessage, frozen=True):
    """Answers WATCH: hashes of chunks, packed. LOOKUP says where each is now.

    Attributes:
        log: Names the log of this start of the sidecar.
        place: Where the next question continues.
        is_complete: False if changes may be missing: every chunk may have come or gone.
    """

    frame_type = FrameType.CHANGES
    log: _Count
    place: _Count
    is_complete: bool
    hashes: Annotated[bytes, Meta(max_length=MAX_NAMES * CHUNK_HASH_BYTES)]


class Stats(StrictMessage, frozen=True):
    """Requests the sidecar's figures."""

    frame_type = FrameType.STATS


class StatsOk(StrictMessage, frozen=True):
    """Answers STATS: figures by tier."""

    frame_type = FrameType.STATS_OK
    stats: dict[str, dict[str, int]]


_KINDS = [kind for base in (Message, StrictMessage, Stage) for kind in base.__subclasses__()]
_DECODERS = MappingProxyType(
    {kind.frame_type: msgspec.msgpack.Decoder(kind) for kind in _KINDS if kind is not StrictMessage}
)
_ENCODER = msgspec.msgpack.Encoder()


def engine_hello(engine: EngineInfo, capabilities: Sequence[str]) -> Hello:
    """Return the first message of a process on a sidecar's socket."""
    name = engine.name[:MAX_NAME_CHARS]
    return Hello(VERSION_MIN, VERSION_MAX, list(capabilities), None, name, engine)


def check_chains(chains: Sequence[ChunkChain]) -> None:
    """Reject chains that are too large for one STAGE.

    Raises:
        ValueError: They have more than `MAX_STAGE_KEYS` keys, or one has more than `MAX_RANKS`
            ranks: a block is at least one chunk of all ranks, during which nothing else runs.
    """
    num_ranks = max((chain.world_size for chain in chains), default=1)
    if num_ranks > MAX_RANKS:
        raise ValueError(f"a chain of {num_ranks} ranks; the limit is {MAX_RANKS}")
    num_keys = sum(chain.num_chunks * chain.world_size for chain in chains)
    if num_keys > MAX_STAGE_KEYS:
        raise ValueError(f"{num_keys} keys in one STAGE; the limit is {MAX_STAGE_KEYS}")


def build_frame(correlation_id: int, message: Message, blob_bytes: int = 0) -> bytes:
    """Return a whole frame except its blob.

    Raises:
        ProtocolError: It would violate a bound.
    """
    meta = _ENCODER.encode(message)
    return (
        build_header(FrameHeader(message.frame_type, correlation_id, len(meta), blob_bytes)) + meta
    )


def parse_meta(frame_type: FrameType, meta: bytes | bytearray | memoryview) -> Message:
    """Parse the MessagePack part of a frame.

    Raises:
        ProtocolError: It does not fit the type of frame, or violates a bound.
    """
    try:
        return _DECODERS[frame_type].decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"{frame_type.name}: {exc}") from exc
