"""The journal of the arena: a file that records every extent that is lent or holds a chunk.

Only the sidecar writes the file. It appends to it, and replaces it as a whole when it has grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from lmcache_core.memory import MemoryObj, SharedArena
from lmcache_core.memory.shared import cannot_be_opened, is_none_of_ours
from lmcache_core.record import Chunk

from lmcache_sidecar.arena.entries import (
    MAX_OFFSETS,
    VERSION,
    AnyEntry,
    Begin,
    Committed,
    FoundExtents,
    Freed,
    JournalError,
    Lent,
    Reserved,
    encode_entry,
    framed,
    read_entries,
    without_padding,
)

logger = logging.getLogger(__name__)

FILE_NAME = "kv.journal"
DRAFT_NAME = f"{FILE_NAME}.new"
MODE = 0o600
MIN_REWRITE_BYTES = 1 << 20
"""A shorter journal is not worth rewriting."""
REWRITE_RATIO = 2
"""The journal is rewritten when it is this many times as long as its replacement would be."""
MAX_JOURNAL_BYTES = 32 << 20
"""Longest journal. It and its replacement fit next to the arena on a volume with 64 MiB to
spare.
"""
MAX_WEIGHT_BYTES = 14 << 20
"""Bound on the entries of a journal; chunks beyond it are not recovered. Twice this and a little
more is less than `MAX_JOURNAL_BYTES`.
"""
MAX_PENDING_ENTRIES = 4096
LENT_BYTES = 24
ENTRY_BYTES = 96
"""Size of an entry in the journal without the head of its chunk; assumes short tenant names."""
RETRY_S = 30.0
"""Interval between attempts to rewrite a failed journal."""
_WRITE_ENTRIES = 512
_NO_FRAME = bytes(16)


def read_journal(directory: Path) -> Iterator[AnyEntry]:
    """Yield the entries that an earlier start has written.

    Raises:
        JournalError: There is no journal, or it cannot be trusted.
        CapacityError: It cannot be opened at the moment, which says nothing about it.
    """
    path, data = directory / FILE_NAME, b""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or status.st_mode & 0o022:
                raise JournalError(f"{path} is not a file that only this user can write")
            data = file.read(2 * MAX_JOURNAL_BYTES + 1)
    except OSError as exc:
        if is_none_of_ours(path, exc):
            raise JournalError(f"{path}: {exc.strerror}") from exc
        raise cannot_be_opened(path, exc) from exc
    if len(data) > 2 * MAX_JOURNAL_BYTES:
        raise JournalError(f"{path} is longer than any journal")
    return read_entries(data)


def discard_journal(directory: Path) -> None:
    """Remove the journal of an earlier start.

    Raises:
        OSError: It exists and cannot be removed.
    """
    for name in (DRAFT_NAME, FILE_NAME):
        (directory / name).unlink(missing_ok=True)


class JournalFile:
    """A new file to append entries to. Not thread-safe.

    Args:
        path: Path of the file; an existing file is removed.

    Raises:
        OSError: It cannot be created.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self.num_bytes = 0
        self._num_entries = 0
        self.fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE
        )

    def write(self, bodies: Iterable[bytes]) -> None:
        """Append entries with a few system calls.

        Raises:
            OSError: Writing failed; the last entry may be incomplete.
        """
        for data in self._pieces(bodies):
            at = 0
            while at < len(data):
                at += os.write(self.fd, memoryview(data)[at:])
            self.num_bytes += len(data)

    def drop(self) -> None:
        """Close and remove a draft that did not replace the journal."""
        os.close(self.fd)
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _pieces(self, bodies: Iterable[bytes]) -> Iterator[bytes]:
        piece: list[bytes] = []
        for body in bodies:
            piece.append(framed(body, self._num_entries))
            self._num_entries += 1
            if len(piece) == _WRITE_ENTRIES:
                yield b"".join(piece)
                piece = []
        yield b"".join(piece)


class ArenaJournal:
    """Tracks every extent that is lent or holds a chunk, and records it. Thread-safe; it calls
    nothing that takes another lock.

    Args:
        arena: The arena; the journal is in its directory.
        found: The extents that an earlier start has left in this arena; they must be taken out of
            the allocator.
        clock: Seconds since the epoch.

    Attributes:
        is_recording: Whether the file is correct and complete, so that the arena's content outlives
            this process. If not, the next start must not find a journal.
    """

    def __init__(
        self, arena: SharedArena, found: FoundExtents, clock: Callable[[], float] = time.time
    ) -> None:
        self._begin = Begin(VERSION, arena.size, arena.inode)
        self._generation = arena.generation
        self._directory = arena.path.parent
        self._clock = clock
        self._lock = threading.Lock()
        self._state: dict[int, Lent | Committed] = {}
        self._weight_bytes = 0
        self._pending: list[bytes] = []
        self._freed: list[int] = []
        self._since: list[bytes] | None = None  # entries written since a draft was begun
        self._abandoned: list[MemoryObj] = []
        self._file: JournalFile | None = None
        self._is_given_up = False
        # Whether the next start can trust the journal that it finds; if not, nothing may be lent.
        self._is_harmless = True
        self._is_closed = False
        self._next_try = 0.0
        self.is_recording = False
        for generation, extents in found.lent.items():
            for offset, num_bytes in extents:
                self._set(offset, Lent(generation, num_bytes))
        for entry in found.committed:
            self._set(entry.offset, entry)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is lent or stored."""
        return not self._state

    def open(self) -> None:
        """Begin a new journal before anything is lent. If it cannot be written, run without one and
        retry later.
        """
        try:
            self._adopt(self._draft(list(self._state.items())))
        except OSError as exc:
            with self._lock:
                self._give_up(exc.strerror or str(exc))

    def close(self) -> None:
        """Flush pending entries. Later events belong to shutdown and are not recorded.
        Idempotent.
        """
        with self._lock:
            self._write()
            self._is_closed = True
            self._close_file()
            abandoned, self._abandoned = self._abandoned, []
        for memory in abandoned:
            memory.ref_count_down()

    def reserved(self, memories: Sequence[MemoryObj]) -> bool:
        """Record that this memory is about to be lent to clients; if False, it must not be lent."""
        extents = tuple((memory.metadata.address, memory.metadata.phy_size) for memory in memories)
        with self._lock:
            if self._is_closed:
                return False
            for offset, num_bytes in extents:
                self._set(offset, Lent(self._generation, num_bytes))
            self._note(Reserved(self._generation, extents))
            self._write()
            return self._is_harmless

    def kept(self, chunk: Chunk) -> None:
        """Record that the memory tier has this chunk in the arena. The tier's lock may be held."""
        if not chunk.is_sealed:
            return
        offset = chunk.memory.metadata.address
        stored_at = self._clock() if chunk.stored_at is None else chunk.stored_at
        head = without_padding(chunk.head)
        entry = Committed(offset, chunk.memory.get_size(), chunk.key.tenant, stored_at, head)
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
        """Record that this extent holds nothing. The allocator's lock is held."""
        with self._lock:
            if not self._is_closed:
                self._forget(offset)

    def flush(self) -> None:
        """Ensure that everything recorded so far outlives this process, even if it is killed
        next.
        """
        with self._lock:
            self._write()

    def abandoned(self, memories: Sequence[MemoryObj]) -> None:
        """Take over memory that a client may still write to during shutdown. It stays lent, also in
        the journal, and is not reused until `close`.
        """
        with self._lock:
            self._abandoned += memories

    async def look_after(self) -> None:
        """Write pending entries; begin a new journal if this one is long or has failed. Call it
        about once a second.
        """
        with self._lock:
            self._write()
            is_long = self._file is not None and self._file.num_bytes > max(
                MIN_REWRITE_BYTES, REWRITE_RATIO * self._weight_bytes
            )
            is_due = is_long or not self.is_recording
            if self._is_closed or not is_due or time.monotonic() < self._next_try:
                return
            items = list(self._state.items())
            self._since = []
        try:
            self._adopt(await asyncio.to_thread(self._draft, items))
        except OSError as exc:
            self._next_try = time.monotonic() + RETRY_S
            with self._lock:
                if not self.is_recording:
                    self._give_up(exc.strerror or str(exc))
        finally:
            with self._lock:
                self._since = None

    def _set(self, offset: int, extent: Lent | Committed) -> None:
        self._drop(offset)  # keeps chunks in the order in which they were stored
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

    def _note(self, entry: AnyEntry) -> None:
        self._note_freed()
        self._pending.append(encode_entry(entry))
        if len(self._pending) >= MAX_PENDING_ENTRIES:
            self._write()

    def _note_freed(self) -> None:
        if self._freed:
            self._pending.append(encode_entry(Freed(tuple(self._freed))))
            self._freed.clear()

    def _write(self) -> None:
        """Append pending entries. A journal that cannot be written, or is too long, is
        abandoned.
        """
        self._note_freed()
        if not self._pending:
            return
        if self._file is not None:
            try:
                self._file.write(self._pending)
            except OSError as exc:
                self._give_up(exc.strerror or str(exc))
            else:
                if self._file.num_bytes > MAX_JOURNAL_BYTES:
                    self._give_up(f"it has more than {MAX_JOURNAL_BYTES} bytes")
        if self._since is not None:
            self._since += self._pending
        self._pending.clear()

    def _draft(self, items: Sequence[tuple[int, Lent | Committed]]) -> JournalFile:
        """Begin a journal that is to replace this one; in any thread.

        Raises:
            OSError: It cannot be written; nothing has changed.
        """
        draft = JournalFile(self._directory / DRAFT_NAME)
        try:
            draft.write(self._bodies(items))
        except OSError:
            draft.drop()
            raise
        return draft

    def _adopt(self, draft: JournalFile) -> None:
        """Replace this journal by a draft.

        Raises:
            OSError: The draft cannot be written or renamed; nothing has changed.
        """
        with self._lock:
            self._write()
            if self._is_closed:
                draft.drop()
                return
            try:
                draft.write(self._since or ())
                draft.path.rename(self._directory / FILE_NAME)
            except OSError:
                draft.drop()
                raise
            self._close_file()
            self._file = draft
            if self._is_given_up:
                logger.info("arena journal recovered: memory outlives this process again")
            self._is_given_up = False
            self.is_recording = self._is_harmless = True

    def _give_up(self, why: str) -> None:
        """First ensure that the next start finds no stale journal that it would trust, since memory
        is lent again right after this call.
        """
        if not self._is_given_up:
            logger.error(
                "cannot write the arena's journal, memory will not outlive this process: error=%s",
                why,
            )
        self._is_given_up = True
        self.is_recording = False
        was_harmless, self._is_harmless = self._is_harmless, self._spoil()
        if self._is_harmless:
            self._close_file()
        elif was_harmless:
            logger.error(
                "cannot remove the stale journal either, refusing stores, because the next start"
                " would trust it: path=%s",
                self._directory / FILE_NAME,
            )

    def _spoil(self) -> bool:
        """Remove the journal or make it unreadable; return whether that was possible."""
        path = self._directory / FILE_NAME
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            return True
        try:
            if self._file is None:
                path.write_bytes(_NO_FRAME)
            else:
                os.pwrite(self._file.fd, _NO_FRAME, 0)
        except OSError:
            return False
        return True

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file.fd)

    def _bodies(self, items: Sequence[tuple[int, Lent | Committed]]) -> Iterator[bytes]:
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
