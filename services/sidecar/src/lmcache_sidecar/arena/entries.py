"""Entries of the arena's journal, their encoding, and how they are replayed.

Source: `docs/adr/0009-arena-generations.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec
import xxhash
from lmcache_core.errors import LMCacheError, RecordError
from lmcache_core.memory.free_list import ALIGN_BYTES, extent_bytes
from lmcache_core.record.codec import CHECKSUM_BYTES, PREFIX_BYTES, decode_prefix

VERSION = 1
MAX_ENTRY_BYTES = 1 << 20
MAX_OFFSETS = 4096
"""Largest number of extents in one `Freed` entry."""

_FRAME = struct.Struct("<IIQ")
"""Length of the body, a check of that length, and a digest of the body; both depend on the entry's
position in the journal.
"""
_NUMBER = struct.Struct("<I")


class JournalError(LMCacheError):
    """A journal cannot be trusted: its arena is not reused."""


class JournalEntry(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True
):
    """Base of all entries."""


class Begin(JournalEntry, frozen=True):
    """The first entry: identifies the arena file that the journal describes."""

    version: int
    arena_bytes: int
    inode: int


class Reserved(JournalEntry, frozen=True):
    """Extents (offset, size) that clients of that generation may write to from now on."""

    generation: int
    extents: tuple[tuple[int, int], ...]


class Committed(JournalEntry, frozen=True):
    """A chunk became visible. `length` is that of its payload; `head` is its record's head without
    padding.
    """

    offset: int
    length: int
    tenant: str
    stored_at: float
    head: bytes


class Freed(JournalEntry, frozen=True):
    """Extents, by offset, that hold nothing and that no client writes to."""

    offsets: tuple[int, ...]


AnyEntry = Begin | Reserved | Committed | Freed

encode_entry = msgspec.msgpack.Encoder().encode
"""Return the body of an entry."""
_DECODER: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def framed(body: bytes, place: int) -> bytes:
    """Frame the body of an entry for its position in the file (0 for the first)."""
    return (
        _FRAME.pack(len(body), _check(len(body), place), xxhash.xxh3_64_intdigest(body, seed=place))
        + body
    )


def read_entries(data: bytes) -> Iterator[AnyEntry]:
    """Yield the entries of a journal.

    A truncated entry at the end was being written when its writer was killed, and nothing had been
    done on its basis: it is skipped. Any other fault means that entries are missing.

    Raises:
        JournalError: An entry is damaged.
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
            raise JournalError(f"entry {place} cannot be decoded: {exc}") from exc
        at, place = at + _FRAME.size + length, place + 1


def without_padding(head: bytes) -> bytes:
    """Return the head of a record without its padding zeros."""
    prefix = decode_prefix(head)
    return head[: PREFIX_BYTES + prefix.header_bytes] + head[-CHECKSUM_BYTES:]


def with_padding(short: bytes) -> bytes:
    """Invert `without_padding`; only the length is checked.

    Raises:
        RecordError: It is not the head of a record.
    """
    prefix = decode_prefix(short)
    if len(short) != PREFIX_BYTES + prefix.header_bytes + CHECKSUM_BYTES:
        raise RecordError("short", f"{len(short)} bytes of a head without padding")
    return short[:-CHECKSUM_BYTES] + bytes(prefix.head_bytes - len(short)) + short[-CHECKSUM_BYTES:]


def _check(length: int, place: int) -> int:
    return xxhash.xxh32_intdigest(_NUMBER.pack(length), seed=place & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Lent:
    """An extent that a client of that generation may write to.

    Attributes:
        num_bytes: Its size in the arena.
    """

    generation: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FoundExtents:
    """The content of an arena according to its journal.

    Attributes:
        lent: For each generation, the extents (offset, size) that its clients may still write to.
        committed: Chunks, in the order in which they were stored.
    """

    lent: Mapping[int, list[tuple[int, int]]] = field(default_factory=lambda: MappingProxyType({}))
    committed: tuple[Committed, ...] = ()


def replay(entries: Iterable[AnyEntry], arena_bytes: int, inode: int) -> FoundExtents:
    """Replay a journal.

    Raises:
        JournalError: It belongs to another arena or version, or is inconsistent: nothing in it is
            trusted.
    """
    steps = iter(entries)
    begin = next(steps, None)
    if begin != Begin(VERSION, arena_bytes, inode):
        raise JournalError(
            f"it belongs to another arena, or to another version of this software: {begin}"
        )
    state: dict[int, Lent | Committed] = {}
    for entry in steps:
        match entry:
            case Begin():
                raise JournalError("it has two Begin entries")
            case Reserved(generation, extents):
                for offset, num_bytes in extents:
                    if offset in state:
                        raise JournalError(f"the extent at {offset} is lent twice")
                    state[offset] = Lent(generation, num_bytes)
            case Committed(offset, length):
                before = state.pop(offset, None)  # keeps the dict in the order of the commits
                if isinstance(before, Committed) or (
                    before is not None and before.num_bytes != extent_bytes(length)
                ):
                    raise JournalError(f"the chunk at {offset} overlaps another one")
                state[offset] = entry
            case Freed(offsets):
                for offset in offsets:
                    if state.pop(offset, None) is None:
                        raise JournalError(f"the extent at {offset} is freed twice")
    _check_extents(state, arena_bytes)
    lent: dict[int, list[tuple[int, int]]] = {}
    for offset, extent in state.items():
        if isinstance(extent, Lent):
            lent.setdefault(extent.generation, []).append((offset, extent.num_bytes))
    return FoundExtents(
        lent, tuple(extent for extent in state.values() if isinstance(extent, Committed))
    )


def _check_extents(state: Mapping[int, Lent | Committed], arena_bytes: int) -> None:
    end = 0
    for offset, extent in sorted(state.items(), key=lambda item: item[0]):
        num_bytes = extent.num_bytes if isinstance(extent, Lent) else extent_bytes(extent.length)
        is_whole = (
            num_bytes > 0
            and offset % ALIGN_BYTES == num_bytes % ALIGN_BYTES == 0
            and (isinstance(extent, Lent) or extent.length >= 0)
        )
        if not is_whole or offset < end or offset + num_bytes > arena_bytes:
            raise JournalError(f"the extent at {offset} overlaps another one or exceeds the arena")
        end = offset + num_bytes
