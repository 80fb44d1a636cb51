"""What the fields of messages may hold, and what all messages are."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_BATCH = 4096
MAX_RECOMPUTE_US = 3_600_000_000
MAX_TICKET_CHARS = 128
MAX_RANKS = 1024
"""Of one engine; a chunk has one key for each."""

Text = Annotated[str, Meta(max_length=1024)]
Key = Annotated[bytes, Meta(max_length=4096)]
Head = Annotated[bytes, Meta(max_length=64 << 10)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Size = Annotated[int, Meta(gt=0, le=4 << 30)]
Deadline = Annotated[int, Meta(ge=1, le=3_600_000)]
RecomputeTime = Annotated[int, Meta(ge=0, le=MAX_RECOMPUTE_US)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_BATCH)]
Handles = Annotated[tuple[Count, ...], Meta(max_length=MAX_BATCH)]
Ticket = Annotated[str, Meta(min_length=1, max_length=MAX_TICKET_CHARS)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; on the wire an array that begins with the class's name."""
