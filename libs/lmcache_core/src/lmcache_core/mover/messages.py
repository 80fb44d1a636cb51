"""What a sidecar and its mover say to each other: one MessagePack object in each packet of a Unix
socket of the type SEQPACKET, which keeps packets whole.

The mover answers `Attach` by `Attached`, and each `Read` by exactly one `Quiet`: from the one to
the other, the memory of the read is the mover's. The end of the connection says that the mover is
dead, since its supervisor closes it last.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

MAX_PACKET_BYTES = 128 << 10
MAX_PIECES = 1024
MAX_BLOB_BYTES = 64 << 10
MAX_ERROR_CHARS = 512

_Id = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Length = Annotated[int, Meta(gt=0, le=4 << 30)]
_Blob = Annotated[bytes, Meta(min_length=1, max_length=MAX_BLOB_BYTES)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Attach(_Message, frozen=True, tag="attach"):
    """Maps an arena; the first request of a connection.

    Attributes:
        path: The arena's file.
        num_bytes: Its size.
        generation: The sidecar's generation, whose lock the mover takes: as long as it lives, no
            later sidecar uses the file.
    """

    path: Annotated[str, Meta(max_length=4096)]
    num_bytes: Annotated[int, Meta(gt=0, lt=1 << 62)]
    generation: _Id


class Attached(_Message, frozen=True, tag="attached"):
    """The mover serves this arena.

    Attributes:
        blob: What movers of peers need to reach this one.
        address: Where the arena begins in the mover's memory: peers name it by these addresses.
    """

    blob: _Blob
    address: _Address


class Read(_Message, frozen=True, tag="read"):
    """Copies from the memory of a peer's mover into the arena.

    Attributes:
        blob: The blob of the peer's mover.
        pieces: Address there, offset in the arena and length of each.
    """

    id: _Id
    blob: _Blob
    pieces: Annotated[
        tuple[tuple[_Address, _Offset, _Length], ...], Meta(min_length=1, max_length=MAX_PIECES)
    ]


class Cancel(_Message, frozen=True, tag="cancel"):
    """Nobody waits for this read any more; its `Quiet` is still due."""

    id: _Id


class Serve(_Message, frozen=True, tag="serve"):
    """Whether peers may be reading from this mover, which is attentive as long as they may."""

    is_on: bool


class Quiet(_Message, frozen=True, tag="quiet"):
    """Nothing writes to the memory of this read any more.

    Attributes:
        error: Why it is not filled; empty: it is.
    """

    id: _Id
    error: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)] = ""


Request: TypeAlias = Attach | Read | Cancel | Serve
Report: TypeAlias = Attached | Quiet
