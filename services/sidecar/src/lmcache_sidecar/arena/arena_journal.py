"""The journal of the arena: each extent that is lent or holds a chunk."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from lmcache_core.memory import MemoryObj, SharedArena
from lmcache_core.record import Chunk

from lmcache_sidecar.arena.entries import (
    MAX_OFFSETS,
    VERSION,
    AnyEntry,
    Begin,
    Committed,
    Freed,
    Reserved,
    encode_entry,
    without_padding,
)
from lmcache_sidecar.arena.journal_file import JournalFile, JournalFiles
from lmcache_sidecar.arena.replay import FoundExtents, Lent

MAX_WEIGHT_BYTES = 14 << 20
"""Chunks that a journal names; what is kept beyond is not recovered. Twice this and a little
more is less than `MAX_JOURNAL_BYTES`.
"""
MAX_PENDING_ENTRIES = 4096
LENT_BYTES = 24
ENTRY_BYTES = 96
"""What an entry takes in the journal beside the head of its chunk; tenants have short names."""
RETRY_S = 30.0
"""Between two attempts to write a journal again that had to be given up."""


class ArenaJournal:
    """Tracks every extent that is lent or kept, and writes it down. Thread-safe; it calls nothing
    that takes a lock of its own.

    Args:
        arena: The arena.
        files: Where to; belongs to this object.
        found: What an earlier start has left in this arena; those extents must be taken out of the
            allocator.
        clock: Seconds since the epoch.
    """

    needs_locks = True

    def __init__(
        self,
        arena: SharedArena,
        files: JournalFiles,
        found: FoundExtents,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._begin = Begin(VERSION, arena.size, arena.inode)
        self._generation = arena.generation
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._state: dict[int, Lent | Committed] = {}
        self._weight_bytes = 0
        self._pending: list[bytes] = []
        self._freed: list[int] = []
        self._since: list[bytes] | None = None
        self._abandoned: list[MemoryObj] = []
        self._is_closed = False
        self._next_try = 0.0
        for generation, extents in found.lent.items():
            for offset, num_bytes in extents:
                self._set(offset, Lent(generation, num_bytes))
        for entry in found.committed:
            self._set(entry.offset, entry)

    @property
    def is_recording(self) -> bool:
        """Whether what is in the arena now will outlive this process."""
        return self._files.is_recording

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lent or kept."""
        return not self._state

    def open(self) -> None:
        """Begin a new journal, before anything is lent. One that cannot be written is done
        without, and tried again later.
        """
        try:
            self._files.adopt(self._files.draft(self._bodies(list(self._state.items()))), ())
        except OSError as exc:
            self._give_up(exc)

    def close(self) -> None:
        """Write down what is left to write; what happens from now on is the end of this process,
        and is not. Idempotent.
        """
        with self._lock:
            self._write()
            self._is_closed = True
            self._files.close()
            abandoned, self._abandoned = self._abandoned, []
        for memory in abandoned:
            memory.ref_count_down()

    def remove(self) -> None:
        """Remove the journal, if that can be done: nothing is in the arena that anybody will
        look for.
        """
        with contextlib.suppress(OSError):
            self._files.discard()

    def reserved(self, memories: Sequence[MemoryObj]) -> bool:
        """See `ReservedExtents.reserved`."""
        extents = tuple((memory.metadata.address, memory.metadata.phy_size) for memory in memories)
        with self._lock:
            if self._is_closed:
                return False
            for offset, num_bytes in extents:
                self._set(offset, Lent(self._generation, num_bytes))
            self._note(Reserved(self._generation, extents))
            self._write()
            return self._files.is_harmless

    def kept(self, chunk: Chunk) -> None:
        """The hot tier keeps this chunk, in memory of the arena. The tier's lock may be held."""
        if not chunk.is_sealed:
            return
        offset = chunk.memory.metadata.address
        stored_at = self._clock() if chunk.stored_at is None else chunk.stored_at
        entry = Committed(
            offset,
            chunk.memory.get_size(),
            chunk.key.tenant,
            stored_at,
            without_padding(chunk.head),
        )
        with self._lock:
            held = self._state.get(offset)
            if self._is_closed or (isinstance(held, Committed) and held.head == entry.head):
                return
            if self._weight_bytes + _weight(entry) > MAX_WEIGHT_BYTES:
                self._forget(offset)
                return
            self._set(offset, entry)
            self._note(entry)

    def freed(self, offset: int) -> None:
        """Nothing is in this extent any more. The allocator's lock is held."""
        with self._lock:
            if not self._is_closed:
                self._forget(offset)

    def flush(self) -> None:
        """See `ReservedExtents.flush`."""
        with self._lock:
            self._write()

    def abandoned(self, memories: Sequence[MemoryObj]) -> None:
        """See `ReservedExtents.abandoned`: they stay lent, in the journal too, and are used by
        nobody else until `close`.
        """
        with self._lock:
            self._abandoned += memories

    async def look_after(self) -> None:
        """Write what waits; begin a new journal where this one is long or was given up. To be
        called every second or so.
        """
        with self._lock:
            self._write()
            is_due = not self._files.is_recording or self._files.is_long(self._weight_bytes)
            if self._is_closed or not is_due or time.monotonic() < self._next_try:
                return
            items = list(self._state.items())
            self._since = []
        try:
            draft = await asyncio.to_thread(self._files.draft, self._bodies(items))
            self._adopt(draft)
        except OSError as exc:
            self._next_try = time.monotonic() + RETRY_S
            if not self._files.is_recording:
                self._give_up(exc)
        finally:
            with self._lock:
                self._since = None

    def _adopt(self, draft: JournalFile) -> None:
        with self._lock:
            self._write()
            if self._is_closed:
                self._files.drop(draft)
            else:
                self._files.adopt(draft, self._since or ())

    def _give_up(self, exc: OSError) -> None:
        with self._lock:
            self._files.give_up(exc.strerror or str(exc))

    def _set(self, offset: int, extent: Lent | Committed) -> None:
        self._drop(offset)  # so that chunks stand in the order in which they were kept
        self._state[offset] = extent
        self._weight_bytes += _weight(extent)

    def _drop(self, offset: int) -> bool:
        extent = self._state.pop(offset, None)
        self._weight_bytes -= 0 if extent is None else _weight(extent)
        return extent is not None

    def _forget(self, offset: int) -> None:
        if self._drop(offset):
            self._freed.append(offset)
            if len(self._freed) >= MAX_OFFSETS:
                self._note_freed()

    def _note_freed(self) -> None:
        if self._freed:
            self._pending.append(encode_entry(Freed(tuple(self._freed))))
            self._freed.clear()

    def _note(self, entry: AnyEntry) -> None:
        self._note_freed()
        self._pending.append(encode_entry(entry))
        if len(self._pending) >= MAX_PENDING_ENTRIES:
            self._write()

    def _write(self) -> None:
        self._note_freed()
        if self._pending:
            self._files.append(self._pending)
            if self._since is not None:
                self._since += self._pending
            self._pending.clear()

    def _bodies(self, items: Sequence[tuple[int, Lent | Committed]]) -> Iterator[bytes]:
        """The shortest journal that says the same."""
        yield encode_entry(self._begin)
        lent: dict[int, list[tuple[int, int]]] = {}
        for offset, extent in items:
            if isinstance(extent, Lent):
                lent.setdefault(extent.generation, []).append((offset, extent.num_bytes))
        for generation, extents in lent.items():
            for at in range(0, len(extents), MAX_OFFSETS):
                yield encode_entry(Reserved(generation, tuple(extents[at : at + MAX_OFFSETS])))
        for _, extent in items:
            if isinstance(extent, Committed):
                yield encode_entry(extent)


def _weight(extent: Lent | Committed) -> int:
    return LENT_BYTES if isinstance(extent, Lent) else ENTRY_BYTES + len(extent.head)
