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
from lmcache_core.keys import CHUNK_HASH_BYTES
from lmcache_core.sidecar.message_fields import MAX_BATCH as MAX_BATCH
from lmcache_core.sidecar.message_fields import MAX_RANKS as MAX_RANKS
from lmcache_core.sidecar.message_fields import MAX_RECOMPUTE_US as MAX_RECOMPUTE_US
from lmcache_core.sidecar.message_fields import MAX_TICKET_CHARS as MAX_TICKET_CHARS
from lmcache_core.sidecar.message_fields import (
    Count,
    Deadline,
    Handles,
    Head,
    Keys,
    RecomputeTime,
    Size,
    Text,
)
from lmcache_core.sidecar.message_fields import Message as Message
from lmcache_core.sidecar.staging_messages import MAX_CHAINS as MAX_CHAINS
from lmcache_core.sidecar.staging_messages import MAX_STAGE_KEYS as MAX_STAGE_KEYS
from lmcache_core.sidecar.staging_messages import Stage as Stage
from lmcache_core.sidecar.staging_messages import StageOk as StageOk
from lmcache_core.sidecar.staging_messages import Unstage as Unstage
from lmcache_core.sidecar.staging_messages import UnstageOk as UnstageOk
from lmcache_core.telemetry.request_context import (
    MAX_REQUEST_ID_CHARS,
    MAX_TRACEPARENT_CHARS,
    Carried,
)

M = TypeVar("M")

VERSION = 1
MAX_MESSAGE_BYTES = 8 << 20
LENGTH = struct.Struct("<I")

STAGE = "stage"
REJECT = "reject"
DESCRIBE = "describe"
CONTEXT = "context"
CAPABILITIES = (STAGE, REJECT, DESCRIBE, CONTEXT)
"""What is beyond the first messages of version 1: each is said only to a side that has named it."""
ON_DEVICE = "on_device"
"""The client's KV is on a GPU: where the sidecar leaves it to us, loads are checked by sample."""
LOCKS = "locks"
"""The client takes the lock of the sidecar's generation before it maps the arena: else the next
sidecar cannot know what it writes to.
"""

_Capabilities = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=64)]


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of a client. What KV it handles (`model`, `rank`, `world_size`, `layout`) is
    for status pages and layout checks.
    """

    version_min: int
    version_max: int
    client: Text
    pid: Count
    rank: Count
    model: Text
    layout: Text
    capabilities: _Capabilities = ()
    world_size: Count = 1


class HelloOk(Message, frozen=True, forbid_unknown_fields=False):
    """The sidecar's answer: where the arena is and how it is to be used."""

    version: int
    server: Text
    arena_path: Text
    arena_bytes: Count
    generation: Count
    verify_hot: Text
    salt: Text
    capabilities: _Capabilities = ()


class Refused(Message, frozen=True, forbid_unknown_fields=False):
    """The request, or the whole connection, is refused. `code`: version, layout, bounds,
    protocol, closing.
    """

    code: Text
    message: Text


class Lookup(Message, frozen=True):
    """How many of these chunks, from the first, are cached; `search_range` limits the tiers ([]
    means all).

    A tier that has not answered after `deadline_ms`, or after the sidecar's own limit, has nothing.
    """

    keys: Keys
    search_range: Annotated[tuple[Text, ...], Meta(max_length=16)]
    deadline_ms: Deadline


class LookupOk(Message, frozen=True):
    """Length of the cached prefix, in chunks, and the tier of each chunk of it."""

    num_prefix: Count
    tiers: tuple[str, ...]


class Prefetch(Message, frozen=True):
    """Lift these chunks into the arena."""

    keys: Keys


class PrefetchOk(Message, frozen=True):
    """The lift has begun, or could not be queued."""

    accepted: bool


class Reserve(Message, frozen=True):
    """Arena memory for chunks to be stored, bytes each."""

    sizes: Annotated[tuple[Size, ...], Meta(max_length=MAX_BATCH)]


class ReserveOk(Message, frozen=True):
    """Reservation id and offset of each, nil where there is no room."""

    reservations: tuple[tuple[int, int] | None, ...]


class Commit(Message, frozen=True):
    """The memory of these reservations is filled; the head names it. A committed reservation is
    gone.
    """

    items: Annotated[tuple[tuple[Count, Head], ...], Meta(max_length=MAX_BATCH)]


class CommitOk(Message, frozen=True):
    """Whether each is now visible."""

    stored: tuple[bool, ...]


class Abort(Message, frozen=True):
    """Give reservations back unused."""

    reservations: Handles


class AbortOk(Message, frozen=True):
    """Done."""


class Pin(Message, frozen=True):
    """Bring chunks into the arena within the deadline and keep them there until `Release`.

    `recompute_us` is what computing one chunk anew costs, microseconds, 0 when not known: loading
    may not take longer than that for each chunk that is not in the arena yet.
    """

    keys: Keys
    deadline_ms: Deadline
    recompute_us: RecomputeTime = 0


class PinnedChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk in the arena."""

    pin: int
    offset: int
    length: int
    head: Head
    tier: Text


class PinOk(Message, frozen=True):
    """The longest prefix of the chunks asked for, and why the next one is missing ("" when none
    is).
    """

    chunks: tuple[PinnedChunk, ...]
    miss_reason: Text


class Release(Message, frozen=True):
    """Give pins back."""

    pins: Handles


class ReleaseOk(Message, frozen=True):
    """Done."""


class Reject(Message, frozen=True):
    """The bytes of these pinned chunks do not have their digests: the sidecar is to look for
    itself. The pins stay. Capability `reject`.
    """

    pins: Handles


class RejectOk(Message, frozen=True):
    """Done: what is damaged is not served any more."""


class Describe(Message, frozen=True):
    """How this client names KV, so that the sidecar's admin can name chunks of token ids.
    Capability `describe`.
    """

    fmt: Text
    model_name: Text
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    chunk_size: Annotated[int, Meta(ge=1, lt=1 << 32)]
    root: Annotated[bytes, Meta(min_length=CHUNK_HASH_BYTES, max_length=CHUNK_HASH_BYTES)]
    groups: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_CHAINS)]


class DescribeOk(Message, frozen=True):
    """Done."""


class Within(Message, frozen=True):
    """A request, as MessagePack, and whose it is, for logs and traces. Answered as the request
    is. Capability `context`.
    """

    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID_CHARS)]
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT_CHARS)]
    request: bytes


class Stats(Message, frozen=True):
    """Ask for the sidecar's figures."""


class StatsOk(Message, frozen=True):
    """Figures by tier."""

    stats: dict[str, dict[str, int]]


Request = (
    Hello
    | Lookup
    | Prefetch
    | Reserve
    | Commit
    | Abort
    | Pin
    | Release
    | Reject
    | Stage
    | Unstage
    | Describe
    | Stats
    | Within
)
_StoreAnswer = ReserveOk | CommitOk | AbortOk
_LoadAnswer = LookupOk | PrefetchOk | StageOk | UnstageOk | PinOk | ReleaseOk | RejectOk
Answer = HelloOk | Refused | _StoreAnswer | _LoadAnswer | DescribeOk | StatsOk

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode_within(message: Message, whose: Carried) -> bytes:
    """As `encode`, with what goes along with the request."""
    return encode(Within(whose.request_id, whose.traceparent, _ENCODER.encode(message)))


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
