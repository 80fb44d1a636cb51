"""The MessagePack part of each frame type, as structs whose every field is bounded.

Messages from HELLO on belong to one agreed version, so that surplus fields are refused; HELLO,
HELLO_OK and ERROR, which cross versions, ignore them.

Source: `docs/protocols.md`, "lm://". Golden vectors: `tests/contract/golden/frames.json`.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from lmcache_core.errors import (
    AuthenticationError,
    CapacityError,
    IdentityError,
    LMCacheError,
    ProtocolError,
    VersionError,
)
from lmcache_core.keys import MAX_CANONICAL_KEY_BYTES, Lane
from lmcache_core.security.names import TENANT_PATTERN
from lmcache_core.telemetry.request_context import MAX_REQUEST_ID_CHARS, MAX_TRACEPARENT_CHARS
from lmcache_core.wire.frames import FrameHeader, FrameType, build_header

VERSION_MIN = 1
VERSION_MAX = 1
MAX_BATCH_KEYS = 128
MAX_LANES = 256
"""Declared by one connection; keys of further lanes are spelled in full."""
MAX_TOKEN_CHARS = 512
MAX_TICKET_CHARS = 4096
MAX_NAME_CHARS = 128
MAX_CAPABILITIES = 32
MAX_ERROR_CHARS = 512
MAX_AGE_MS = (1 << 53) - 1
ANY_SERVER = "lmcache"
"""What a server calls itself that has no name of its own."""

_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Capabilities = Annotated[list[_Name], Meta(max_length=MAX_CAPABILITIES)]
_Version = Annotated[int, Meta(ge=0, le=65535)]
_Index = Annotated[int, Meta(ge=0, lt=MAX_BATCH_KEYS)]
_Tenant = Annotated[str, Meta(pattern=rf"^{TENANT_PATTERN}$(?!\n)", max_length=63)]
_LaneNumber = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
NameRun = tuple[_LaneNumber | None, Annotated[bytes, Meta(max_length=MAX_CANONICAL_KEY_BYTES)]]
"""Chunk names in a row: a lane's number and the packed hashes, `CHUNK_HASH_BYTES` each. Without a
number, one canonical key, of a chunk whose hash is not 32 bytes or whose lane found no number.
"""
_NameRuns = Annotated[list[NameRun], Meta(max_length=MAX_BATCH_KEYS)]


class ErrorCode(StrEnum):
    """What an ERROR frame is about."""

    VERSION = "version"
    AUTHENTICATION = "authentication"
    PROTOCOL = "protocol"
    BUSY = "busy"
    BAD_REQUEST = "bad_request"
    UNAVAILABLE = "unavailable"


class Message(msgspec.Struct, frozen=True, array_like=True):
    """What every frame's meta has in common: the type of frame that carries it."""

    frame_type: ClassVar[FrameType]


class Hello(Message, frozen=True, array_like=True):
    """Opens a connection.

    Attributes:
        version_min: Oldest version the client speaks.
        version_max: Newest one.
        capabilities: Names of optional abilities; see `lmcache_core.wire.capabilities`.
        token: Bearer token, nil without one.
        client: Name of the client, for logs and to compare tickets with.
    """

    frame_type = FrameType.HELLO
    version_min: _Version
    version_max: _Version
    capabilities: _Capabilities
    token: Annotated[str, Meta(max_length=MAX_TOKEN_CHARS)] | None
    client: _Name


class HelloOk(Message, frozen=True, array_like=True):
    """Accepts a connection.

    Attributes:
        version: Version that both speak from here on.
        capabilities: Those of the client's that the server has too.
        server: Name of the server: its instance id, or `ANY_SERVER`.
        max_batch: Most keys in one request.
    """

    frame_type = FrameType.HELLO_OK
    version: _Version
    capabilities: _Capabilities
    server: _Name
    max_batch: Annotated[int, Meta(ge=1, le=MAX_BATCH_KEYS)]


class Contains(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks which chunks are there."""

    frame_type = FrameType.CONTAINS
    names: _NameRuns


class ContainsOk(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answers CONTAINS and HELD, in the order of the names."""

    frame_type = FrameType.CONTAINS_OK
    present: Annotated[list[bool], Meta(max_length=MAX_BATCH_KEYS)]


class Get(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for chunks.

    Attributes:
        names: Which ones.
        prefix_only: Stop at the first that is missing.
        ticket: A broker's ticket, nil without one.
    """

    frame_type = FrameType.GET
    names: _NameRuns
    prefix_only: bool
    ticket: Annotated[str, Meta(max_length=MAX_TICKET_CHARS)] | None


class ChunkHead(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Announces the record in the blob: the answer to the key of that index."""

    frame_type = FrameType.CHUNK
    index: _Index


class GetEnd(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Ends the answer to GET: `(index, reason)` of what was not sent."""

    frame_type = FrameType.GET_END
    misses: Annotated[list[tuple[_Index, _Name]], Meta(max_length=MAX_BATCH_KEYS)]


class Put(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Announces the record in the blob, to be kept."""

    frame_type = FrameType.PUT


class HandoverChunk(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Announces the record in the blob, which a server that ends hands over to another one.
    Answered by PUT_OK.

    Attributes:
        tenant: Whose chunk it is.
        age_ms: How long ago it was stored.
        may_evict: Whether others may be given up for it; else it is taken only where there is room.
    """

    frame_type = FrameType.HANDOVER
    tenant: _Tenant
    age_ms: Annotated[int, Meta(ge=0, le=MAX_AGE_MS)]
    may_evict: bool


class Held(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks which chunks of a tenant are there to stay. Answered by CONTAINS_OK.

    Attributes:
        tenant: Whose chunks.
        names: Which ones.
    """

    frame_type = FrameType.HELD
    tenant: _Tenant
    names: _NameRuns


class PutOk(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answers PUT and HANDOVER: whether the store holds the chunk now and, if not, why."""

    frame_type = FrameType.PUT_OK
    stored: bool
    reason: _Name


class Remove(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks to forget chunks."""

    frame_type = FrameType.REMOVE
    names: _NameRuns


class RemoveOk(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answers REMOVE: how many were there."""

    frame_type = FrameType.REMOVE_OK
    count: Annotated[int, Meta(ge=0, le=MAX_BATCH_KEYS)]


class Ping(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for a sign of life."""

    frame_type = FrameType.PING


class Pong(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answers PING."""

    frame_type = FrameType.PONG


class DeclareLane(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Gives a lane a number, for the names of later requests of this connection. No answer.

    Attributes:
        number: 0 for the connection's first lane, then the next number.
        lane: What it stands for.
    """

    frame_type = FrameType.LANE
    number: _LaneNumber
    lane: Lane


class Context(Message, frozen=True, array_like=True):
    """Whose request the next frame is, for logs and traces. It has no answer; sent to servers that
    heed the capability `context`.

    Attributes:
        request_id: "" for none.
        traceparent: As the W3C writes it, "" for none.
    """

    frame_type = FrameType.CONTEXT
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID_CHARS)]
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT_CHARS)]


class ErrorMessage(Message, frozen=True, array_like=True):
    """Refuses a request, or with correlation id 0 the connection.

    Attributes:
        code: One of `ErrorCode`, or one of a later version.
        message: For people.
    """

    frame_type = FrameType.ERROR
    code: _Name
    message: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]

    @classmethod
    def about(cls, exc: LMCacheError) -> ErrorMessage:
        """Return the frame that tells of a refusal."""
        match exc:
            case VersionError():
                code = ErrorCode.VERSION
            case ProtocolError():
                code = ErrorCode.PROTOCOL
            case AuthenticationError():
                code = ErrorCode.AUTHENTICATION
            case IdentityError():
                code = ErrorCode.BAD_REQUEST
            case CapacityError():
                code = ErrorCode.BUSY
            case _:
                code = ErrorCode.UNAVAILABLE
        return cls(code.value, str(exc)[:MAX_ERROR_CHARS])


_MESSAGES: tuple[type[Message], ...] = (
    Hello,
    HelloOk,
    Contains,
    ContainsOk,
    Get,
    ChunkHead,
    GetEnd,
    Put,
    PutOk,
    Remove,
    RemoveOk,
    Ping,
    Pong,
    ErrorMessage,
    HandoverChunk,
    Context,
    Held,
    DeclareLane,
)
_DECODERS = MappingProxyType({kind.frame_type: msgspec.msgpack.Decoder(kind) for kind in _MESSAGES})
_ENCODER = msgspec.msgpack.Encoder()


def build_frame(correlation_id: int, message: Message, blob_bytes: int = 0) -> bytes:
    """Everything of a frame but its blob.

    Raises:
        ProtocolError: A bound would be broken.
    """
    meta = _ENCODER.encode(message)
    return (
        build_header(FrameHeader(message.frame_type, correlation_id, len(meta), blob_bytes)) + meta
    )


def parse_meta(frame_type: FrameType, meta: bytes | bytearray | memoryview) -> Message:
    """Read the MessagePack part of a frame.

    Raises:
        ProtocolError: It is not what that type of frame carries, or breaks a bound.
    """
    try:
        return _DECODERS[frame_type].decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"{frame_type.name}: {exc}") from exc
