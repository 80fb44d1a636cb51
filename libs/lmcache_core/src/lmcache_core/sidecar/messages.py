"""Messages of the sidecar socket.

Source: `docs/protocols.md`, "Sidecar socket".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from lmcache_core.errors import ProtocolError

M = TypeVar("M")

VERSION = 1
MAX_MESSAGE_BYTES = 8 << 20
MAX_BATCH = 4096
MAX_RECOMPUTE_US = 3_600_000_000
LENGTH = struct.Struct("<I")

_Text = Annotated[str, Meta(max_length=1024)]
_Key = Annotated[bytes, Meta(max_length=4096)]
_Head = Annotated[bytes, Meta(max_length=64 << 10)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Size = Annotated[int, Meta(gt=0, le=4 << 30)]
_Deadline = Annotated[int, Meta(ge=1, le=3_600_000)]
_Keys = Annotated[tuple[_Key, ...], Meta(max_length=MAX_BATCH)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; on the wire an array that begins with the class's name."""


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of a client. `model` and `layout` say what KV it handles, for status pages and layout checks."""

    version_min: int
    version_max: int
    client: _Text
    pid: _Count
    rank: _Count
    model: _Text
    layout: _Text


class HelloOk(Message, frozen=True, forbid_unknown_fields=False):
    """The sidecar's answer: where the arena is and how it is to be used."""

    version: int
    server: _Text
    arena_path: _Text
    arena_bytes: _Count
    generation: _Count
    verify_hot: _Text
    salt: _Text


class Refused(Message, frozen=True, forbid_unknown_fields=False):
    """The request, or the whole connection, is refused. `code`: version, bounds, protocol, closing."""

    code: _Text
    message: _Text


class Lookup(Message, frozen=True):
    """How many of these chunks, from the first, are cached; `search_range` limits the tiers ([] means all).

    A tier that has not answered after `deadline_ms`, or after the sidecar's own limit, has nothing.
    """

    keys: _Keys
    search_range: Annotated[tuple[_Text, ...], Meta(max_length=16)]
    deadline_ms: _Deadline


class LookupOk(Message, frozen=True):
    """Length of the cached prefix, in chunks, and the tier of each chunk of it."""

    num_prefix: _Count
    tiers: tuple[str, ...]


class Prefetch(Message, frozen=True):
    """Lift these chunks into the arena."""

    keys: _Keys


class PrefetchOk(Message, frozen=True):
    """The lift has begun, or could not be queued."""

    accepted: bool


class Reserve(Message, frozen=True):
    """Arena memory for chunks to be stored, bytes each."""

    sizes: Annotated[tuple[_Size, ...], Meta(max_length=MAX_BATCH)]


class ReserveOk(Message, frozen=True):
    """Reservation id and offset of each, nil where there is no room."""

    reservations: tuple[tuple[int, int] | None, ...]


class Commit(Message, frozen=True):
    """The memory of these reservations is filled; the head names it. A committed reservation is gone."""

    items: Annotated[tuple[tuple[_Count, _Head], ...], Meta(max_length=MAX_BATCH)]


class CommitOk(Message, frozen=True):
    """Whether each is now visible."""

    stored: tuple[bool, ...]


class Abort(Message, frozen=True):
    """Give reservations back unused."""

    reservations: Annotated[tuple[_Count, ...], Meta(max_length=MAX_BATCH)]


class AbortOk(Message, frozen=True):
    """Done."""


class Pin(Message, frozen=True):
    """Bring chunks into the arena within the deadline and keep them there until `Release`.

    `recompute_us` is what computing one chunk anew costs, microseconds, 0 when not known: loading may not take longer than that for
    each chunk that is not in the arena yet.
    """

    keys: _Keys
    deadline_ms: _Deadline
    recompute_us: Annotated[int, Meta(ge=0, le=MAX_RECOMPUTE_US)] = 0


class PinnedChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk in the arena."""

    pin: int
    offset: int
    length: int
    head: _Head
    tier: _Text


class PinOk(Message, frozen=True):
    """The longest prefix of the chunks asked for, and why the next one is missing ("" when none is)."""

    chunks: tuple[PinnedChunk, ...]
    miss_reason: _Text


class Release(Message, frozen=True):
    """Give pins back."""

    pins: Annotated[tuple[_Count, ...], Meta(max_length=MAX_BATCH)]


class ReleaseOk(Message, frozen=True):
    """Done."""


class Stats(Message, frozen=True):
    """Ask for the sidecar's figures."""


class StatsOk(Message, frozen=True):
    """Figures by tier."""

    stats: dict[str, dict[str, int]]


Request = Hello | Lookup | Prefetch | Reserve | Commit | Abort | Pin | Release | Stats
Answer = HelloOk | Refused | LookupOk | PrefetchOk | ReserveOk | CommitOk | AbortOk | PinOk | ReleaseOk | StatsOk

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    """The message behind its length.

    Raises:
        ProtocolError: It is longer than `MAX_MESSAGE_BYTES`.
    """
    body = _ENCODER.encode(message)
    check_length(len(body))
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Read a client's message.

    Raises:
        ProtocolError: It is not one, or a field is out of bounds.
    """
    return _decode(_REQUESTS, body, "a request")


def decode_answer(body: bytes) -> Answer:
    """Read the sidecar's message.

    Raises:
        ProtocolError: It is not one, or a field is out of bounds.
    """
    return _decode(_ANSWERS, body, "an answer")


def _decode(decoder: msgspec.msgpack.Decoder[M], body: bytes, what: str) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"not {what}: {exc}") from exc


def check_length(length: int) -> None:
    """Refuse a message of impossible length.

    Raises:
        ProtocolError: Zero or above `MAX_MESSAGE_BYTES`.
    """
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")


def split_batches(items: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    """Cut a sequence into tuples of at most `MAX_BATCH`."""
    return [tuple(items[at : at + MAX_BATCH]) for at in range(0, len(items), MAX_BATCH)]
