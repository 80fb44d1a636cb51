"""Entries of the arena's journal, and their bytes.

Source: `docs/adr/0009-arena-generations.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import xxhash
from lmcache_core.errors import LMCacheError, RecordError
from lmcache_core.record.codec import CHECKSUM_BYTES, PREFIX_BYTES, decode_prefix

VERSION = 1
MAX_ENTRY_BYTES = 1 << 20
MAX_OFFSETS = 4096
"""In one entry of freed extents."""

_FRAME = struct.Struct("<IIQ")
"""Bytes of the body, a check of that number, a digest of the body; both depend on the entry's
place in the journal.
"""
_NUMBER = struct.Struct("<I")


class JournalError(LMCacheError):
    """A journal cannot be trusted: the arena beside it is not used again."""


class JournalEntry(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True
):
    """Base of all entries."""


class Begin(JournalEntry, frozen=True):
    """First of all: which arena file this journal is of."""

    version: int
    arena_bytes: int
    inode: int


class Reserved(JournalEntry, frozen=True):
    """Extents (offset, bytes) that clients of that generation may write to from now on."""

    generation: int
    extents: tuple[tuple[int, int], ...]


class Committed(JournalEntry, frozen=True):
    """A chunk is visible. `length` is that of its payload; `head` is its record's, without the
    padding.
    """

    offset: int
    length: int
    tenant: str
    stored_at: float
    head: bytes


class Freed(JournalEntry, frozen=True):
    """Extents, by offset, that hold nothing any more and that nobody writes to."""

    offsets: tuple[int, ...]


AnyEntry = Begin | Reserved | Committed | Freed

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode_entry(entry: AnyEntry) -> bytes:
    """The body of an entry."""
    return _ENCODER.encode(entry)


def framed(body: bytes, place: int) -> bytes:
    """An entry as it stands in the file, at that place (0 for the first)."""
    return (
        _FRAME.pack(len(body), _check(len(body), place), xxhash.xxh3_64_intdigest(body, seed=place))
        + body
    )


def read_entries(data: bytes) -> Iterator[AnyEntry]:
    """The entries of a journal, one after the other.

    What stands at the end and is shorter than it says was being written when its writer was killed,
    and was never acted upon: it is left out. Whatever else is wrong means that entries are missing
    which nobody can name.

    Raises:
        JournalError: Something is damaged.
    """
    at, place = 0, 0
    while len(data) - at >= _FRAME.size:
        length, check, digest = _FRAME.unpack_from(data, at)
        if not 0 < length <= MAX_ENTRY_BYTES or check != _check(length, place):
            raise JournalError(f"entry {place} has no length")
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(body) < length:
            return
        if digest != xxhash.xxh3_64_intdigest(body, seed=place):
            raise JournalError(f"entry {place} is damaged")
        try:
            yield _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise JournalError(f"entry {place} is none: {exc}") from exc
        at, place = at + _FRAME.size + length, place + 1


def without_padding(head: bytes) -> bytes:
    """The head of a record without the zeros in it."""
    prefix = decode_prefix(head)
    return head[: PREFIX_BYTES + prefix.header_bytes] + head[-CHECKSUM_BYTES:]


def with_padding(short: bytes) -> bytes:
    """The inverse of `without_padding`; nothing is checked but the length.

    Raises:
        RecordError: It is not the head of a record.
    """
    prefix = decode_prefix(short)
    if len(short) != PREFIX_BYTES + prefix.header_bytes + CHECKSUM_BYTES:
        raise RecordError("short", f"{len(short)} bytes of a head without padding")
    return short[:-CHECKSUM_BYTES] + bytes(prefix.head_bytes - len(short)) + short[-CHECKSUM_BYTES:]


def _check(length: int, place: int) -> int:
    return xxhash.xxh32_intdigest(_NUMBER.pack(length), seed=place & 0xFFFFFFFF)
