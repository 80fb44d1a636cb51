"""What a journal says about the arena beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lmcache_core.memory.free_list import ALIGN_BYTES, extent_bytes

from lmcache_sidecar.arena.entries import (
    VERSION,
    AnyEntry,
    Begin,
    Committed,
    Freed,
    JournalError,
    Reserved,
)


@dataclass(frozen=True, slots=True)
class Lent:
    """An extent that a client of that generation may write to.

    Attributes:
        generation: Whose clients.
        num_bytes: What it takes of the arena.
    """

    generation: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FoundExtents:
    """What is in an arena, by its journal.

    Attributes:
        lent: By generation the extents (offset, bytes) that its clients may still write to.
        committed: Chunks, in the order in which they were kept.
    """

    lent: Mapping[int, list[tuple[int, int]]] = field(default_factory=lambda: MappingProxyType({}))
    committed: tuple[Committed, ...] = ()


def replay(entries: Iterable[AnyEntry], arena_bytes: int, inode: int) -> FoundExtents:
    """Follow a journal to its end.

    Raises:
        JournalError: It is of another arena or version, or says what cannot be: nothing of it is
            then believed.
    """
    steps = iter(entries)
    begin = next(steps, None)
    if begin != Begin(VERSION, arena_bytes, inode):
        raise JournalError(
            f"it is of another arena, or of another version of this software: {begin}"
        )
    state: dict[int, Lent | Committed] = {}
    for entry in steps:
        match entry:
            case Begin():
                raise JournalError("it begins twice")
            case Reserved(generation, extents):
                for offset, num_bytes in extents:
                    if offset in state:
                        raise JournalError(f"the extent at {offset} is given out twice")
                    state[offset] = Lent(generation, num_bytes)
            case Committed(offset, length):
                before = state.pop(offset, None)  # so that the order is that of the commits
                if isinstance(before, Committed) or (
                    before is not None and before.num_bytes != extent_bytes(length)
                ):
                    raise JournalError(f"the chunk at {offset} is where another one is")
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
            raise JournalError(f"the extent at {offset} overlaps another one or leaves the arena")
        end = offset + num_bytes
