"""Records in files: written whole or not at all, verified when read. Blocking; runs in the tier's
threads.
"""

from __future__ import annotations

import errno
import logging
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

from lmcache_core.errors import RecordError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.names import DISK_TIER
from lmcache_core.record import Chunk, Miss, MissReason, RecordHeader, RecordReason, decode_head
from lmcache_core.storage.disk.backoff import WriteBackoff
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskEntry, DiskIndex
from lmcache_core.storage.disk.layout import FILE_DEPTH, DiskLayout, charged_bytes, tenant_of
from lmcache_core.storage.disk.lock import DirectoryLock
from lmcache_core.storage.disk.record_file import (
    BLOCK_BYTES,
    check_payload,
    name_record,
    opened,
    read_head,
    read_payload,
    write_record,
)
from lmcache_core.storage.disk.room import DiskRoom, Unread
from lmcache_core.storage.disk.scan import LATER_VERSION, Found, read_entry, scan
from lmcache_core.telemetry import Counters

logger = logging.getLogger(__name__)

NOT_A_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ESPIPE})
"""Errors which show that something other than a record is in its place. All others come from the
environment (descriptors, memory, permissions, a transient device error) and say nothing about the
file.
"""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a volume or quota without blocks or inodes left, whatever the capacity is."""
AGAIN_S = 5.0
"""A file that causes device errors is set aside if it fails again this much later, while other
files can be read.
"""
EVENTS = (
    "corrupt_chunks",
    "missing_files",
    "failed_reads",
    "failed_writes",
    "rejected_writes",
    "damaged_at_start",
    "foreign_at_start",
    "leftovers_at_start",
)
"""Names of the counters in `stats`."""


@dataclass(eq=False)
class _Write:
    """A chunk whose file is being written.

    Attributes:
        outcome: None while its file is wanted; False once the chunk has been removed; True once
            another record of it is served that this one would not replace.
    """

    key: ChunkKey
    lossy: bool
    outcome: bool | None = None


class DiskStore:
    """The files of one tier. Thread-safe.

    Names change (rename, unlink) only under one lock and together with the index, so that an entry
    always matches its file. Contents are written and read without the lock.

    A file that cannot be read stays in place, charged and not served, until `look_again` can read
    it or a new record replaces it.

    Args:
        index: The records held; its capacity is never exceeded, files being written included.
        on_removed: Called in a worker thread with every key that is dropped.
        fsync: Wait for the device before a record is visible.
        lock: Lock by which this process owns the directory.
        backoff: Pauses writes after one that the disk refused.
    """

    def __init__(
        self,
        layout: DiskLayout,
        index: DiskIndex,
        files: DiskFiles,
        on_removed: Callable[[ChunkKey], None],
        fsync: bool,
        lock: DirectoryLock,
        backoff: WriteBackoff,
    ) -> None:
        self._layout = layout
        self._index = index
        self._files = files
        self._on_removed = on_removed
        self._fsync = fsync
        self._lock = lock
        self._names_lock = threading.Lock()
        self._room = DiskRoom(layout, index, files, on_removed)
        self._backoff = backoff
        self._counters = Counters()
        self._crowded_out_bytes = 0
        self._failed: WeakKeyDictionary[DiskEntry, tuple[float, int]] = WeakKeyDictionary()
        self._num_good_reads = 0
        self._writing: set[_Write] = set()
        self._synced: WeakSet[DiskEntry] = WeakSet()  # with their names; only under `fsync`
        self._synced_names: set[Path] = set()
        self.is_loaded = False

    def load(self) -> None:
        """Take over the files of an earlier process: serve whole records and remove half-written
        ones.

        Raises:
            OSError: The root cannot be read.
        """
        root = self._layout.root
        half_written, bad = self._paths_in(self._layout.temporary), self._paths_in(self._layout.bad)
        found = scan(self._layout, self._files, [root])
        if root in found.unread and found.error is not None:
            raise found.error
        with self._names_lock:
            for path in half_written:
                self._counters.add("leftovers_at_start")
                try:
                    self._files.unlink(path)
                except OSError:
                    self._hold_damaged(path)
            for path in bad:
                self._hold_damaged(path)
            self._take_over(found)
            self.is_loaded = True
        self._counters.add("damaged_at_start", len(found.damaged))
        self._counters.add("foreign_at_start", found.num_foreign)
        self._counters.add("failed_reads", len(found.unread))
        if found.damaged:
            logger.warning(
                "damaged files found, not serving them: path=%s files=%d", root, len(found.damaged)
            )
        if found.later:
            logger.warning(
                "records of a later version found, leaving them: path=%s records=%d",
                root,
                len(found.later),
            )
        if found.error is not None:
            logger.warning(
                "cannot read files, trying again: path=%s files=%d error=%s",
                root,
                len(found.unread),
                found.error.strerror,
            )

    @property
    def num_written(self) -> int:
        """Return how many records have been written."""
        return self._counters.value("written_records")

    @property
    def has_unread(self) -> bool:
        """Return whether `look_again` has anything to do."""
        return bool(self._room.unread or self._room.doubtful) or not self.is_loaded

    def look_again(self) -> bool:
        """Retry files that could not be read, and serve those that can be read now.

        Returns:
            Whether there are chunks to serve that were not served before.

        Raises:
            OSError: The root still cannot be read.
        """
        if not self.is_loaded:
            self.load()
            return True
        with self._names_lock:
            unread = dict(self._room.unread) | {
                path: Unread(charge) for path, charge in self._room.doubtful.items()
            }
        places = [
            path for path, why in unread.items() if not why.needs_payload or self._is_readable(path)
        ]
        found = scan(self._layout, self._files, places)
        if not self._lock.is_held():
            return False  # a file that is not found here is not proven to be gone
        with self._names_lock:
            # A write or a removal may have come first: then the old facts no longer describe the
            # file.
            still_unread = (self._room.unread.keys() | self._room.doubtful.keys()) & set(places)
            had_unread = bool(self._room.unread)

            def is_ours(path: Path) -> bool:
                return not still_unread.isdisjoint({path, *path.parents})

            found.records = [
                (key, entry) for key, entry in found.records if is_ours(self._layout.record(key))
            ]
            doubtful = [path for path, _ in (*found.damaged, *found.later) if is_ours(path)]
            judged = scan(self._layout, self._files, doubtful)
            found.records += judged.records
            found.damaged, found.later = judged.damaged, judged.later
            found.unread = {path: size for path, size in found.unread.items() if is_ours(path)}
            found.unread |= judged.unread
            for path in still_unread:
                self._room.forget(path)
            self._take_over(found)
        if had_unread and not self._room.unread:
            logger.info("files can be read again: path=%s", self._layout.root)
        return bool(found.records)

    def write(self, chunk: Chunk) -> bool:
        """Store one chunk. The caller keeps its memory alive until this returns.

        Returns:
            True if a record for that key is complete and readable.
        """
        if self._index.past(1):
            self.expire()
        write = _Write(chunk.key, chunk.lossy)
        with self._names_lock:
            served = None
            if not self._index.wants(chunk.key, chunk.lossy):
                [served] = self._index.peek_many([chunk.key])
            if served is None:
                self._writing.add(write)
        if served is not None:
            return isinstance(served, DiskEntry) and self._sync_served(chunk.key, served)
        try:
            return self._write(chunk, write)
        finally:
            with self._names_lock:
                self._writing.discard(write)

    def _sync_served(self, key: ChunkKey, entry: DiskEntry) -> bool:
        """Make sure that a served record is on the device. Another write may be about to sync it; a
        record found at the start may never have been synced.
        """
        path = self._layout.find(key)
        if not self._fsync or entry in self._synced or path is None:
            return True
        try:
            with opened(self._files, path) as fd:
                self._files.sync(fd)
            self._sync_names(path)
        except OSError:
            self._counters.add("failed_writes")
            return False
        self._synced.add(entry)
        return self._index.peek_many([key]) == [entry]

    def _write(self, chunk: Chunk, write: _Write) -> bool:
        payload_bytes = chunk.memory.get_size()
        entry = DiskEntry(
            chunk.num_bytes - payload_bytes, payload_bytes, chunk.lossy, chunk.stored_at
        )
        path = self._layout.find(chunk.key)
        if (
            path is None
            or not self._index.could_hold(chunk.key.tenant, entry.charge)
            or not self._backoff.allows()
        ):
            self._counters.add("rejected_writes")
            return False
        if self._is_crowded_out(entry.charge):
            self._counters.add("rejected_writes")
            self._note_crowded_out(entry.charge)
            return False
        try:
            is_kept = self._write_reserved(chunk, write, entry, path)
        except OSError as exc:
            self._counters.add("failed_writes")
            if exc.errno in FULL:
                self._index.note_full(entry.charge)
            if self._backoff.failed():
                logger.warning(
                    "disk refuses writes, retrying later: path=%s error=%r",
                    self._layout.root,
                    exc.strerror,
                )
            return False
        if not is_kept:  # refused before touching the disk
            self._counters.add("rejected_writes")
            return False
        self._counters.add("written_records")
        self._index.note_room()
        if self._backoff.succeeded():
            logger.info("disk takes writes again: path=%s", self._layout.root)
        return True

    def read(self, key: ChunkKey, entry: DiskEntry, memory: MemoryObj) -> Chunk | Miss:
        """Read and verify one chunk.

        Args:
            memory: Memory for the payload; the reference passes to the chunk returned, or is
                released on a miss.
        """
        try:
            head, header = self._read_into(key, entry, memory.byte_array)
        except (OSError, RecordError) as exc:
            memory.ref_count_down()
            return self._unreadable(key, entry, exc)
        except BaseException:
            memory.ref_count_down()
            raise
        self._num_good_reads += 1  # unlocked: a lost update is harmless, it only has to grow
        return Chunk(key, header, head, memory, DISK_TIER, entry.stored_at)

    def describe(self, key: ChunkKey, entry: DiskEntry) -> RecordHeader | Miss:
        """Return the header of a record, read from its head; damage is handled as by `read`."""
        try:
            with opened(self._files, self._layout.record(key)) as fd:
                return decode_head(read_head(self._files, fd, entry.head_bytes), key.key)[0]
        except (OSError, RecordError) as exc:
            return self._unreadable(key, entry, exc)

    def adopt(self, key: ChunkKey, payload_bytes: int | None = None) -> bool:
        """Serve a record that another component has put in place.

        Args:
            payload_bytes: Accept it only if its payload has this length.

        Returns:
            True if a record for that key is readable and complete, judging by its head; False if
                the file is not a record of that key, has expired, or does not fit.
        """
        path = self._layout.find(key)
        if path is None:
            return False
        try:
            _, entry = read_entry(self._files, key.tenant, path, self._files.stat(path))
        except (OSError, RecordError):
            return False
        if payload_bytes not in (None, entry.payload_bytes):
            return False
        with self._names_lock:
            if not self._index.wants(key, entry.lossy):
                return True
            if not self._index.reserve(entry.charge, key.tenant):
                return False
            self._commit(key, entry, path)
        return self._index.contains_many([key])[0]  # False if it has expired

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks and their files, including those not served now, and return how many there
        were.

        A file that cannot be removed stays charged.

        Raises:
            UnavailableError: The volume is gone, or another process owns the directory.
        """
        self._check_held()
        num_removed = 0
        for key in keys:
            path = self._layout.find(key)
            if path is None:
                continue
            with self._names_lock:
                for write in self._writing:
                    if write.key == key:
                        write.outcome = False
                entry = self._index.remove(key)
                charge = self._room.forget(path) if entry is None else entry.charge
                if charge is None:
                    continue
                self._room.unlink(path, charge)
            num_removed += 1
            self._on_removed(key)
        return num_removed

    def clear(self, tenant: str | None = None) -> int:
        """Remove everything (of that tenant) and return how many there were. Content of a directory
        that cannot be read stays. Raises as `remove`.
        """
        self._check_held()
        with self._names_lock:
            for write in self._writing:
                if tenant in (None, write.key.tenant):
                    write.outcome = False
            unserved = [
                *self._room.unread,
                *self._room.damaged,
                *self._room.doubtful,
                *self._room.later,
            ]
        num_removed = self.remove(self._index.keys(tenant))
        with self._names_lock:
            for path in unserved:
                parts = path.relative_to(self._layout.root).parts
                if len(parts) == FILE_DEPTH and tenant in (None, tenant_of(parts[0])):
                    self._room.unlink(path, self._room.forget(path) or 0)
                    num_removed += 1
        return num_removed

    def expire(self) -> None:
        """Drop expired chunks and their files, a bounded number of them; none while the volume is
        gone.
        """
        if self._lock.is_held():
            with self._names_lock:
                self._room.expire()

    def stats(self) -> dict[str, int]:
        """Return the figures of the index and this store's counters."""
        figures = self._index.stats() | {event: self._counters.value(event) for event in EVENTS}
        return figures | {
            "quarantined_files": len(self._room.damaged) + len(self._room.doubtful),
            "unread_files": len(self._room.unread),
            "is_failing": int(
                self._backoff.is_failing or self._is_crowded_out(self._crowded_out_bytes)
            ),
        }

    def _is_crowded_out(self, charge: int) -> bool:
        """Return whether unreadable files leave no room for a write, even if everything else is
        removed.
        """
        return self._room.unread_bytes + charge > self._index.capacity_bytes

    def _note_crowded_out(self, charge: int) -> None:
        """Report writes as failing as long as one of that size does not fit."""
        is_news = not self._crowded_out_bytes or not self._is_crowded_out(self._crowded_out_bytes)
        self._crowded_out_bytes = charge
        if is_news:
            logger.warning(
                "no room for writes, unreadable files take it: path=%s unread_files=%d"
                " unread_bytes=%d",
                self._layout.root,
                len(self._room.unread),
                self._room.unread_bytes,
            )

    def _check_held(self) -> None:
        if not self._lock.is_held():
            raise UnavailableError(
                f"disk path {self._layout.root}: its volume is gone, or another process has its"
                " .lock"
            )

    def _write_reserved(self, chunk: Chunk, write: _Write, entry: DiskEntry, path: Path) -> bool:
        if not self._lock.is_held():  # below a mount point lies another file system
            raise OSError(errno.ENODEV, "the volume is gone, or another process has its .lock")
        if not self._index.reserve(entry.charge, chunk.key.tenant):
            with self._names_lock:
                if not self._room.reserve(entry.charge, chunk.key.tenant):
                    return False
        temporary = self._layout.new_temporary()
        is_committed = False
        try:
            write_record(self._files, temporary, chunk, self._fsync)
            with self._names_lock:
                if write.outcome is False:  # a write that hung must not bring the chunk back
                    return False
                if write.outcome is None:
                    name_record(self._files, temporary, path)
                    self._commit(chunk.key, entry, path)
                    is_committed = True
                [served] = self._index.peek_many([chunk.key])
        finally:
            if not is_committed:
                self._discard(temporary, entry.charge, chunk.key.tenant)
        if not isinstance(served, DiskEntry):  # it expired at once
            return False
        if not is_committed:
            return self._sync_served(chunk.key, served)
        if self._fsync:
            try:
                self._sync_names(path)
            except OSError:
                # A chunk that counts as not stored must not be served: it is not announced.
                if served not in self._synced:
                    self.remove([chunk.key])
                raise
            self._synced.add(served)
        return True

    def _commit(self, key: ChunkKey, entry: DiskEntry, path: Path) -> None:
        """Serve a record that has its name. Called with the lock for names held."""
        self._room.forget(path)
        self._index.commit(key, entry)
        for write in self._writing:
            if write.key == key and (write.lossy or not entry.lossy):
                write.outcome = True

    def _sync_names(self, path: Path) -> None:
        """Wait until a record's name is on the device, and once those of the directories above it.

        It does not matter who made a directory: an earlier write, or process, may have failed
        before it synced the name.
        """
        self._files.sync_directory(path.parent)
        for directory in path.parents:
            if directory in self._synced_names:
                continue
            if self._files.is_given(directory):
                self._synced_names.update((directory, *directory.parents))
                break
            self._files.sync_directory(directory.parent)
            self._synced_names.add(directory)

    def _discard(self, temporary: Path, charge: int, tenant: str) -> None:
        try:
            self._files.unlink(temporary)
        except OSError:
            with self._names_lock:
                self._room.hold_damaged(temporary, charge)
        self._index.unreserve(charge, tenant)

    def _take_over(self, found: Found) -> None:
        for path, size in found.damaged:
            self._hold_refused(path, charged_bytes(size))
        for path, size in found.later:
            self._room.hold_later(path, charged_bytes(size))
        for path, size in found.unread.items():
            self._room.hold_unread(path, Unread(charged_bytes(size)))
        self._index.restore(found.records)
        self._room.shrink()

    def _is_readable(self, path: Path) -> bool:
        """Return whether every byte of a file can be read, whatever its content."""
        block = bytearray(BLOCK_BYTES)
        at = 0
        try:
            with opened(self._files, path) as fd:
                while num_read := self._files.read(fd, block, at):
                    at += num_read
        except OSError:
            return False
        return True

    def _read_into(
        self, key: ChunkKey, entry: DiskEntry, payload: memoryview
    ) -> tuple[bytes, RecordHeader]:
        with opened(self._files, self._layout.record(key)) as fd:
            head = read_head(self._files, fd, entry.head_bytes)
            header, payload_bytes = decode_head(head, key.key)
            if payload_bytes != len(payload):
                raise RecordError(
                    RecordReason.SHORT, f"payload of {payload_bytes} bytes, {len(payload)} expected"
                )
            read_payload(self._files, fd, len(head), header, payload)
        return head, header

    def _unreadable(self, key: ChunkKey, entry: DiskEntry, exc: OSError | RecordError) -> Miss:
        """Return the miss for a file that could not be used, and stop serving it if that is its
        own fault.

        Only its own digest, read twice, condemns a record: it is set aside. What was read as
        something else (zeros, a part, another record) stays in place and is looked at again, since
        the system may have answered for the file.
        """
        is_missing = isinstance(exc, FileNotFoundError) and self._lock.is_held()
        if isinstance(exc, OSError) and not is_missing and exc.errno not in NOT_A_FILE:
            self._counters.add("failed_reads")
            if exc.errno == errno.EIO and self._fails_again(entry):
                self._set_aside_unread(key, entry, exc)
            return Miss(MissReason.UNAVAILABLE)
        path = self._layout.record(key)
        is_condemned = isinstance(exc, RecordError) and exc.reason is RecordReason.DIGEST
        if is_condemned and (again := self._error_of(key, path)) != str(exc):
            self._counters.add("failed_reads")
            logger.warning(
                "two reads of a file differ, keeping it: path=%s first=%s second=%s",
                path,
                exc,
                again or "whole",
            )
            return Miss(MissReason.UNAVAILABLE)
        with self._names_lock:
            if self._index.remove(key, entry) is None:
                return Miss(MissReason.EVICTED)
            if isinstance(exc, RecordError) and exc.reason in LATER_VERSION:
                self._room.hold_later(path, entry.charge)
            elif not is_missing:
                if is_condemned:
                    self._room.set_aside(path, entry.charge)
                else:
                    self._hold_refused(path, entry.charge)
                self._index.note_damage(key)
        self._on_removed(key)
        self._counters.add("missing_files" if is_missing else "corrupt_chunks")
        if is_missing:
            return Miss(MissReason.NEVER_STORED)
        logger.warning(
            "damaged chunk on disk, not serving it: chunk=%s error=%r", key.key.chunk_hash, str(exc)
        )
        is_other = isinstance(exc, RecordError) and exc.reason == RecordReason.WRONG_KEY
        return Miss(MissReason.IDENTITY if is_other else MissReason.CORRUPT)

    def _error_of(self, key: ChunkKey, path: Path) -> str:
        """Return the error of a record, read from its device into separate memory; "" if it is
        valid.
        """
        try:
            with opened(self._files, path) as fd:
                self._files.drop_cached(fd)
                head = read_head(self._files, fd)
                header, payload_bytes = decode_head(head, key.key)
                check_payload(self._files, fd, len(head), header, payload_bytes)
        except (OSError, RecordError) as exc:
            return str(exc)
        return ""

    def _hold_refused(self, path: Path, charge: int) -> None:
        """Keep a file that was read as no record; move aside what is no file, so that a record can
        be written there.
        """
        try:
            is_file = stat.S_ISREG(self._files.stat(path).st_mode)
        except FileNotFoundError:
            return
        except OSError:
            is_file = True  # unknown
        if is_file:
            self._room.hold_doubtful(path, charge)
        else:
            self._room.set_aside(path, charge)

    def _fails_again(self, entry: DiskEntry) -> bool:
        """Return whether that file failed at least `AGAIN_S` ago and other files were read
        since.
        """
        with self._names_lock:
            now = time.monotonic()
            failed_at, num_good_reads = self._failed.setdefault(entry, (now, self._num_good_reads))
            return now - failed_at >= AGAIN_S and self._num_good_reads > num_good_reads

    def _set_aside_unread(self, key: ChunkKey, entry: DiskEntry, exc: OSError) -> None:
        """Stop serving a chunk until its whole file can be read or it is stored again."""
        with self._names_lock:
            if self._index.remove(key, entry) is None:
                return
            self._index.note_damage(key, MissReason.UNAVAILABLE)
            unread = Unread(entry.charge, needs_payload=True)
            self._room.hold_unread(self._layout.record(key), unread)
        self._on_removed(key)
        logger.warning(
            "chunk unreadable, not serving it until it can be read: chunk=%s error=%s",
            key.key.chunk_hash,
            exc.strerror,
        )

    def _hold_damaged(self, path: Path) -> None:
        try:
            num_bytes = self._files.stat(path).st_size
        except FileNotFoundError:
            return
        except OSError:
            num_bytes = 0  # unknown
        self._room.hold_damaged(path, charged_bytes(num_bytes))

    def _paths_in(self, directory: Path) -> list[Path]:
        try:
            return [directory / name for name in self._files.list_directory(directory)]
        except FileNotFoundError:
            return []
