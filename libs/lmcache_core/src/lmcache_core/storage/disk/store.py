"""Records in files: written whole or not at all, verified when read. Blocking; runs in the tier's threads."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lmcache_core.errors import RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, Miss, MissReason, RecordHeader, RecordReason, decode_head
from lmcache_core.storage.disk.backoff import WriteBackoff
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskEntry, DiskIndex
from lmcache_core.storage.disk.layout import DiskLayout, charged_bytes
from lmcache_core.storage.disk.quarantine import Quarantine
from lmcache_core.storage.disk.record_file import name_record, opened, read_head, read_payload, write_record
from lmcache_core.storage.disk.room import DiskRoom
from lmcache_core.storage.disk.scan import read_entry, scan
from lmcache_core.telemetry import Counters

logger = logging.getLogger(__name__)

TIER_NAME = "LocalDiskBackend"
DAMAGE_ERRNOS = frozenset({errno.EIO, errno.ELOOP, errno.EISDIR})
"""Errors that say something about the file; others (no descriptors, no memory) leave it for the next read."""
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
"""What is counted, under these names in `stats`."""


class DiskStore:
    """The files of one tier. Thread-safe.

    Names change (rename, unlink) only under one lock, together with the index, so that an entry always tells what its file
    is. Contents are written and read without it.

    Args:
        layout: Where files lie.
        index: What is held; its capacity is never exceeded, files that are being written included.
        files: How files are touched.
        on_removed: Called in a worker thread with every key that is given up.
        fsync: Wait for the device before a record is visible.
    """

    def __init__(self, layout: DiskLayout, index: DiskIndex, files: DiskFiles, on_removed: Callable[[ChunkKey], None], fsync: bool) -> None:
        self._layout = layout
        self._index = index
        self._files = files
        self._on_removed = on_removed
        self._fsync = fsync
        self._names_lock = threading.Lock()
        self._quarantine = Quarantine(layout, index, files)
        self._room = DiskRoom(layout, index, files, self._quarantine, on_removed)
        self._backoff = WriteBackoff()
        self._counters = Counters()

    def load(self) -> None:
        """Take over what an earlier process left: whole records are served again, everything half-written goes.

        Raises:
            OSError: The root cannot be read.
        """
        found = scan(self._layout, self._files)
        with self._names_lock:
            self._remove_half_written()
            for path in self._paths_in(self._layout.bad):
                with contextlib.suppress(OSError):
                    self._quarantine.adopt(path, charged_bytes(self._files.stat(path).st_size))
            for path, size in found.damaged:
                self._quarantine.take(path, charged_bytes(size))
            self._index.restore(found.records)
            self._room.shrink()
        self._counters.add("damaged_at_start", len(found.damaged))
        self._counters.add("foreign_at_start", found.num_foreign)
        if found.damaged:
            logger.warning("%d files in %s are damaged and are not served", len(found.damaged), self._layout.root)

    def write(self, chunk: Chunk) -> bool:
        """Keep one chunk. The caller holds its memory until this returns.

        Returns:
            True when a record for that key is complete and readable.
        """
        if self._index.past(1):
            self.expire()
        if not self._index.wants(chunk.key, chunk.lossy):
            return True
        payload_bytes = chunk.memory.get_size()
        entry = DiskEntry(chunk.num_bytes - payload_bytes, payload_bytes, chunk.lossy, chunk.stored_at)
        path = self._path(chunk.key)
        if path is None or not self._index.could_hold(chunk.key.tenant, entry.charge) or not self._backoff.allows():
            self._counters.add("rejected_writes")
            return False
        try:
            is_kept = self._write_reserved(chunk, entry, path)
        except OSError as exc:
            self._counters.add("failed_writes")
            if self._backoff.failed():
                logger.warning("disk tier %s does not take writes: %s; it is tried again later", self._layout.root, exc.strerror)
            return False
        if not is_kept:  # the disk was not asked
            self._counters.add("rejected_writes")
        elif self._backoff.succeeded():
            logger.info("disk tier %s takes writes again", self._layout.root)
        return is_kept

    def read(self, key: ChunkKey, entry: DiskEntry, memory: MemoryObj) -> Chunk | Miss:
        """Read and verify one chunk.

        Args:
            key: Its name.
            entry: What the index said about it.
            memory: Room for the payload; its reference passes to the chunk returned, or is given back.
        """
        try:
            head, header = self._read_into(key, entry, memory.byte_array)
        except (OSError, RecordError) as exc:
            memory.ref_count_down()
            return self._unreadable(key, entry, exc)
        except BaseException:
            memory.ref_count_down()
            raise
        return Chunk(key, header, head, memory, TIER_NAME, entry.stored_at)

    def describe(self, key: ChunkKey, entry: DiskEntry) -> RecordHeader | Miss:
        """What a record holds, read from its head; a damaged one is dealt with as by `read`."""
        try:
            with opened(self._files, self._layout.record(key)) as fd:
                return decode_head(read_head(self._files, fd, entry.head_bytes), key.key)[0]
        except (OSError, RecordError) as exc:
            return self._unreadable(key, entry, exc)

    def adopt(self, key: ChunkKey, payload_bytes: int | None = None) -> bool:
        """Serve a record that somebody has put in its place.

        Args:
            key: Its name.
            payload_bytes: Only if its payload has this length.

        Returns:
            True when a record for that key is complete, as far as its head tells, and readable; False when the file is none of that
            key, its time is over, or there is no room for it.
        """
        path = self._path(key)
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
            self._quarantine.forget(path)
            self._index.commit(key, entry)
        return self._index.contains_many([key])[0]  # not if its time is over already

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks and remove their files; how many were held. A file that cannot be removed stays charged."""
        num_removed = 0
        for key in keys:
            with self._names_lock:
                entry = self._index.remove(key)
                if entry is None:
                    continue
                path = self._layout.record(key)
                try:
                    self._files.unlink(path)
                except OSError:
                    self._quarantine.adopt(path, entry.charge)
            num_removed += 1
            self._on_removed(key)
        return num_removed

    def expire(self) -> None:
        """Forget chunks whose time is over and remove their files, a bounded number of them."""
        with self._names_lock:
            self._room.expire()

    def stats(self) -> dict[str, int]:
        """Figures of the index and of everything that was counted."""
        figures = self._index.stats() | {event: self._counters.value(event) for event in EVENTS}
        return figures | {"quarantined_files": len(self._quarantine), "is_failing": int(self._backoff.is_failing)}

    def _path(self, key: ChunkKey) -> Path | None:
        try:
            return self._layout.record(key)
        except ValueError:
            return None

    def _write_reserved(self, chunk: Chunk, entry: DiskEntry, path: Path) -> bool:
        if not self._reserve(entry.charge, chunk.key.tenant):
            return False
        temporary = self._layout.new_temporary()
        is_committed = False
        try:
            write_record(self._files, temporary, chunk, self._fsync)
            with self._names_lock:
                if self._index.wants(chunk.key, chunk.lossy):
                    name_record(self._files, temporary, path, self._layout.root, self._fsync)
                    self._quarantine.forget(path)
                    self._index.commit(chunk.key, entry)
                    is_committed = True
        finally:
            if not is_committed:
                self._discard(temporary, entry.charge, chunk.key.tenant)
        if self._fsync:
            self._files.sync_directory(path.parent)
        return True

    def _discard(self, temporary: Path, charge: int, tenant: str) -> None:
        try:
            self._files.unlink(temporary)
        except OSError:
            with self._names_lock:
                self._quarantine.adopt(temporary, charge)
        self._index.unreserve(charge, tenant)

    def _reserve(self, charge: int, tenant: str) -> bool:
        if self._index.reserve(charge, tenant):
            return True
        with self._names_lock:
            return self._room.reserve(charge, tenant)

    def _read_into(self, key: ChunkKey, entry: DiskEntry, payload: memoryview) -> tuple[bytes, RecordHeader]:
        with opened(self._files, self._layout.record(key)) as fd:
            head = read_head(self._files, fd, entry.head_bytes)
            header, payload_bytes = decode_head(head, key.key)
            if payload_bytes != len(payload):
                raise RecordError(RecordReason.SHORT, f"payload of {payload_bytes} bytes, {len(payload)} expected")
            read_payload(self._files, fd, len(head), header, payload)
        return head, header

    def _unreadable(self, key: ChunkKey, entry: DiskEntry, exc: OSError | RecordError) -> Miss:
        is_missing = isinstance(exc, FileNotFoundError)
        if isinstance(exc, OSError) and not is_missing and exc.errno not in DAMAGE_ERRNOS:
            self._counters.add("failed_reads")
            return Miss(MissReason.UNAVAILABLE)
        with self._names_lock:
            if self._index.remove(key, entry) is None:
                return Miss(MissReason.EVICTED)
            if not is_missing:
                self._quarantine.take(self._layout.record(key), entry.charge)
                self._index.note_damage(key)
        self._on_removed(key)
        self._counters.add("missing_files" if is_missing else "corrupt_chunks")
        if is_missing:
            return Miss(MissReason.NEVER_STORED)
        logger.warning("chunk %s on disk is damaged (%s) and is not served", key.key.chunk_hash, exc)
        is_other = isinstance(exc, RecordError) and exc.reason == RecordReason.WRONG_KEY
        return Miss(MissReason.IDENTITY if is_other else MissReason.CORRUPT)

    def _remove_half_written(self) -> None:
        for path in self._paths_in(self._layout.temporary):
            self._counters.add("leftovers_at_start")
            try:
                self._files.unlink(path)
            except OSError:
                self._quarantine.adopt(path, charged_bytes(self._files.stat(path).st_size))

    def _paths_in(self, directory: Path) -> list[Path]:
        try:
            return [directory / name for name in self._files.list_directory(directory)]
        except FileNotFoundError:
            return []
