"""The remote tier in a directory shared by many processes and hosts: a network file system or a
mounted bucket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lmcache_core._typing import override
from lmcache_core.concurrency import run_together
from lmcache_core.config.options import DIRECTORY_RULE, directory_of_url
from lmcache_core.errors import ConfigError, RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import (
    Allocate,
    Chunk,
    Miss,
    MissReason,
    RecordHeader,
    RecordReason,
    Result,
    decode_head,
)
from lmcache_core.storage.disk.backoff import WriteBackoff
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.layout import DiskLayout, is_record, is_shard, tenant_of
from lmcache_core.storage.disk.pool import FilePool, release_result
from lmcache_core.storage.disk.record_file import (
    check_payload,
    name_record,
    opened,
    read_head,
    read_payload,
    write_record,
)
from lmcache_core.storage.remote.base import RemoteBackend, RemoteOptions
from lmcache_core.wire.incoming import miss_for

NUM_THREADS = 8
"""Concurrent file operations: enough to hide network latency."""
CLOSE_WAIT_S = 2.0


def create(url: str, options: RemoteOptions) -> FileBackend:
    """Return the backend for a `file:///directory` URL.

    Raises:
        ConfigError: The URL is malformed.
    """
    parts = urlsplit(url)
    try:
        path = directory_of_url(url)
    except UnicodeEncodeError:  # its message would repeat the URL
        raise ConfigError("remote_url: no directory has such a name") from None
    if parts.netloc or not path.strip("/") or "\0" in path or parts.query or parts.fragment:
        raise ConfigError(f"remote_url: {DIRECTORY_RULE}; it must exist")
    return FileBackend(Path(path), options)


class FileBackend(RemoteBackend):
    """Chunks as files, one record each, in a directory without an owner.

    Any number of processes may write the same chunk concurrently: each writes its own file and
    renames it, and the last one stays. No state is kept between calls, nothing is locked, and
    nothing is evicted: limiting the directory's size is up to its operators, by a quota or by
    removing files not read for long. The directory must exist; it is not created, so that a missing
    mount is an unavailable tier and not a full local disk.

    Args:
        options: Deadline of a call.
    """

    def __init__(self, root: Path, options: RemoteOptions, files: DiskFiles | None = None) -> None:
        super().__init__(str(root))
        self._timeout_s = options.timeout_s
        self.root = root
        self._directory = SharedDirectory(root, files or DiskFiles())
        self._pool = FilePool("lmcache-files", NUM_THREADS)
        self._turns = asyncio.Semaphore(NUM_THREADS)

    async def open(self) -> None:
        """Start the threads, one of which removes temporary files of dead writers. The directory
        need not exist yet.
        """
        self._pool.open()
        self._pool.submit(self._directory.remove_stale)

    async def close(self) -> None:
        """Let running file operations finish, for up to `CLOSE_WAIT_S` seconds. Idempotent."""
        await self._pool.close(CLOSE_WAIT_S)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks exist. One `stat` per chunk; records are not read."""
        async with self._mapped(self._timeout_s):
            return await self._pool.run(self._directory.contains, keys)

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks: several files concurrently, each straight into memory and verified in a
        thread.
        """
        self._pool.check_open()

        async def read(results: list[Result | None]) -> None:
            async with self._mapped(self._timeout_s):
                await run_together(
                    self._get(i, key, allocate, results) for i, key in enumerate(keys)
                )

        return await self._collect(len(keys), timeout_s, read, MissReason.UNAVAILABLE)

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store chunks. False if the directory accepts no more, and for a while after that."""
        self._pool.check_open()
        kept = [False] * len(chunks)
        async with self._mapped(self._timeout_s):
            await run_together(self._put(i, chunk, kept) for i, chunk in enumerate(chunks))
        self._stored_chunks += sum(kept)
        return kept

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        async with self._mapped(self._timeout_s):
            return await self._pool.run(self._directory.remove, keys)

    @override
    async def clear(self, tenant: str | None = None) -> int:
        """Remove everything, for all users of the directory. Walks it, without a deadline."""
        async with self._mapped(None):
            return await self._pool.run(self._directory.clear, tenant)

    async def _get(
        self, place: int, key: ChunkKey, allocate: Allocate, results: list[Result | None]
    ) -> None:
        async with self._turns:
            found = await self._pool.run(self._directory.find, key, discard=_close)
            if isinstance(found, Miss):
                results[place] = found
                return
            memory = None
            try:
                memory = allocate(found.payload_bytes)
            finally:
                if memory is None:
                    found.close()
            results[place] = (
                Miss(MissReason.NO_MEMORY) if memory is None else await self._read(found, memory)
            )

    async def _read(self, found: FoundRecord, memory: MemoryObj) -> Result:
        """Pass `found` and `memory` to a thread, which finishes even if this is cancelled."""

        def give_back(reading: Future[Result] | None) -> None:
            if reading is None or reading.cancelled():
                found.close()
                memory.ref_count_down()

        try:
            reading = self._pool.submit(self._directory.read, found, memory)
        except BaseException:
            give_back(None)
            raise
        reading.add_done_callback(give_back)
        return await self._pool.result_of(reading, discard=release_result)

    async def _put(self, place: int, chunk: Chunk, kept: list[bool]) -> None:
        async with self._turns:
            chunk.memory.ref_count_up()
            try:
                writing = self._pool.submit(self._directory.write, chunk)
            except BaseException:
                chunk.release()
                raise
            writing.add_done_callback(lambda _: chunk.release())
            kept[place] = await self._pool.result_of(writing)


def _close(found: FoundRecord | Miss) -> None:
    if isinstance(found, FoundRecord):
        found.close()


logger = logging.getLogger(__name__)

GROWING_S = 60.0
"""On some mounts a file is visible while it is still being uploaded: one that looks damaged is left
alone until it is this old.
"""
STALE_S = 86400.0
"""A temporary file this old was left by a writer that died."""
MAX_STALE_FILES = 1024
"""Stale files removed in one call."""
MAX_UNREAD_KEYS = 4096

_TAKES_NO_MORE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
)
"""Write errors that a directory may return while it can still be read."""
_ABSENT = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record whose head has been read and matches the request. Its file stays open until
    `SharedDirectory.read` or `close`.

    Attributes:
        status: Status of the open file, which `path` may no longer name.
    """

    key: ChunkKey
    path: Path
    fd: int
    status: os.stat_result
    head: bytes
    header: RecordHeader
    payload_bytes: int

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


class _Unread:
    """Remembers chunks whose payload could not be read or was damaged; the oldest are forgotten
    first. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[ChunkKey, tuple[int, int]] = OrderedDict()

    def has(self, key: ChunkKey, status: os.stat_result) -> bool:
        """Return whether reading this file failed, and not one that another writer replaced."""
        with self._lock:
            return self._keys.get(key) == (status.st_ino, status.st_mtime_ns)

    def note(self, key: ChunkKey, status: os.stat_result) -> None:
        with self._lock:
            self._keys[key] = status.st_ino, status.st_mtime_ns
            if len(self._keys) > MAX_UNREAD_KEYS:
                self._keys.popitem(last=False)

    def forget(self, key: ChunkKey) -> None:
        with self._lock:
            self._keys.pop(key, None)


class SharedDirectory:
    """Looks up, reads, writes and removes records. File names are those of the disk tier.

    Args:
        root: The directory, which must exist.
    """

    def __init__(self, root: Path, files: DiskFiles) -> None:
        self._layout = DiskLayout(root)
        self._files = files
        self._backoff = WriteBackoff()
        self._unread = _Unread()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks have a file. One that could not be read is reported as absent, so
        that it is stored again.

        Raises:
            OSError: The directory is missing or does not respond.
        """
        found = [
            (status := self._status_of(key)) is not None and not self._unread.has(key, status)
            for key in keys
        ]
        if not any(found):
            self._check_root()
        return found

    def find(self, key: ChunkKey) -> FoundRecord | Miss:
        """Return the record of that chunk, open, or the reason why there is none.

        Raises:
            OSError: The directory is missing.
        """
        path = self._layout.find(key)
        if path is None:
            return Miss(MissReason.NEVER_STORED)
        try:
            fd = self._files.open(path)
        except _ABSENT:
            self._check_root()
            return Miss(MissReason.NEVER_STORED)
        except OSError as exc:
            return Miss(MissReason.CORRUPT if exc.errno == errno.ELOOP else MissReason.UNAVAILABLE)
        try:
            found = self._found(key, path, fd)
        except BaseException:
            self._files.close(fd)
            raise
        if isinstance(found, Miss):
            self._files.close(fd)
        return found

    def read(self, found: FoundRecord, memory: MemoryObj) -> Result:
        """Read and verify the payload, and close the file.

        Args:
            memory: Memory for the payload; the reference passes to the chunk returned, or is
                released on a miss.
        """
        try:
            read_payload(self._files, found.fd, len(found.head), found.header, memory.byte_array)
        except RecordError as exc:
            memory.ref_count_down()
            self._unread.note(found.key, found.status)
            return self._refuse(found.key, found.path, found.status, exc)
        except OSError as exc:
            memory.ref_count_down()
            if exc.errno == errno.EIO:  # others say nothing about the file
                self._unread.note(found.key, found.status)
            return Miss(MissReason.UNAVAILABLE)
        except BaseException:
            memory.ref_count_down()
            raise
        finally:
            found.close()
        self._unread.forget(found.key)
        return Chunk(found.key, found.header, found.head, memory, STORAGE_TIER)

    def write(self, chunk: Chunk) -> bool:
        """Store one chunk. The caller keeps its memory alive until this returns.

        Returns:
            True if a whole record has its final name; False if the directory accepts no more, or
                did not a short while ago.

        Raises:
            OSError: The directory is missing, or writing failed in another way.
        """
        path = self._layout.find(chunk.key)
        if path is None:
            return False
        if self._holds(path, chunk):
            return True
        if not self._backoff.allows():
            return False
        temporary = self._layout.new_temporary()
        try:
            self._check_root()
            write_record(self._files, temporary, chunk, fsync=False)
            name_record(self._files, temporary, path)
        except OSError as exc:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)
            if exc.errno not in _TAKES_NO_MORE:
                raise
            if self._backoff.failed():
                logger.warning(
                    "shared directory refuses writes, retrying later: path=%s error=%r",
                    self._layout.root,
                    exc.strerror,
                )
            return False
        self._unread.forget(chunk.key)
        if self._backoff.succeeded():
            logger.info("shared directory takes writes again: path=%s", self._layout.root)
        return True

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove the files of chunks; return how many there were.

        Raises:
            OSError: One of them cannot be removed.
        """
        present = [
            path
            for key in keys
            if self._status_of(key) and (path := self._layout.find(key)) is not None
        ]
        for path in present:
            self._files.unlink(path)
        return len(present)

    def clear(self, tenant: str | None = None) -> int:
        """Remove every record (of that tenant); return how many there were.

        Raises:
            OSError: The directory cannot be read, or one of them cannot be removed.
        """
        num_removed = 0
        for path in self._records(tenant):
            with contextlib.suppress(*_ABSENT):  # removed by another process
                if stat.S_ISREG(self._files.stat(path).st_mode):
                    self._files.unlink(path)
                    num_removed += 1
        return num_removed

    def remove_stale(self) -> None:
        """Remove temporary files of dead writers. Never raises `OSError`: others may be removing
        them, too.
        """
        with contextlib.suppress(OSError):
            for name in self._files.list_directory(self._layout.temporary)[:MAX_STALE_FILES]:
                path = self._layout.temporary / name
                with contextlib.suppress(OSError):
                    if time.time() - self._files.stat(path).st_mtime > STALE_S:
                        self._files.unlink(path)

    def _check_root(self) -> None:
        status = self._files.stat(self._layout.root)
        if stat.S_ISLNK(status.st_mode):
            status = self._layout.root.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def _status_of(self, key: ChunkKey) -> os.stat_result | None:
        path = self._layout.find(key)
        try:
            status = None if path is None else self._files.stat(path)
        except _ABSENT:
            return None
        return status if status is not None and stat.S_ISREG(status.st_mode) else None

    def _found(self, key: ChunkKey, path: Path, fd: int) -> FoundRecord | Miss:
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Miss(MissReason.CORRUPT)
            head, header, payload_bytes = self._read_head(key, fd, status)
        except RecordError as exc:
            return self._refuse(key, path, status, exc)
        except OSError:
            return Miss(MissReason.UNAVAILABLE)
        return FoundRecord(key, path, fd, status, head, header, payload_bytes)

    def _read_head(
        self, key: ChunkKey, fd: int, status: os.stat_result
    ) -> tuple[bytes, RecordHeader, int]:
        head = read_head(self._files, fd)
        header, payload_bytes = decode_head(head, key.key)
        if status.st_size != len(head) + payload_bytes:
            raise RecordError(
                RecordReason.SHORT,
                f"{status.st_size} bytes, its head says {len(head) + payload_bytes}",
            )
        return head, header, payload_bytes

    def _holds(self, path: Path, chunk: Chunk) -> bool:
        """Return whether the file holds a record that the new one would not improve on."""
        try:
            fd = self._files.open(path)
        except OSError:
            return False
        try:
            found = self._found(chunk.key, path, fd)
            return (
                isinstance(found, FoundRecord)
                and (chunk.lossy or not found.header.lossy)
                and self._is_readable(found, chunk)
            )
        finally:
            self._files.close(fd)

    def _is_readable(self, found: FoundRecord, chunk: Chunk) -> bool:
        """Return whether the payload is whole, if an earlier read of it failed; one that cannot be
        read now may be readable later, so a lossy chunk does not replace a lossless record.
        """
        if not self._unread.has(chunk.key, found.status):
            return True
        try:
            self._files.drop_cached(found.fd)
            check_payload(self._files, found.fd, len(found.head), found.header, found.payload_bytes)
        except RecordError:
            return False
        except OSError:
            return chunk.lossy and not found.header.lossy
        self._unread.forget(chunk.key)
        return True

    def _refuse(self, key: ChunkKey, path: Path, status: os.stat_result, exc: RecordError) -> Miss:
        """Remove a record that its own digest condemns, if its path still refers to it: not one
        that has just replaced it.

        The record is read a second time, and removed only if the same error occurs: other hosts
        share the directory, and this host's memory may be faulty. What was read as something else
        (zeros, a part, another record) stays, since a server may have answered for the file; it is
        reported as absent, and replaced by the next store.
        """
        is_ours = exc.reason not in (RecordReason.VERSION, RecordReason.EXTENSION)
        if not is_ours or time.time() - status.st_mtime <= GROWING_S:
            return miss_for(exc)
        try:
            if self._is_still(path, status):
                again = self._error_of(key, path)
                if again != str(exc):
                    logger.warning(
                        "two reads of a file differ, keeping it: path=%s first=%s second=%s",
                        path,
                        exc,
                        again or "whole",
                    )
                    return Miss(MissReason.UNAVAILABLE)
                if exc.reason is not RecordReason.DIGEST:
                    self._unread.note(key, status)
                elif self._is_still(path, status):
                    self._files.unlink(path)
                    logger.warning("unusable file removed: path=%s error=%s", path, exc)
        except _ABSENT:
            pass  # removed by another process
        except OSError:
            return Miss(MissReason.UNAVAILABLE)
        return miss_for(exc)

    def _is_still(self, path: Path, status: os.stat_result) -> bool:
        now = self._files.stat(path)
        return os.path.samestat(now, status) and now.st_mtime_ns == status.st_mtime_ns

    def _error_of(self, key: ChunkKey, path: Path) -> str:
        """Return the error of a record, read as a whole into separate memory; "" if it is valid."""
        with opened(self._files, path) as fd:
            self._files.drop_cached(fd)
            try:
                head, header, payload_bytes = self._read_head(key, fd, os.fstat(fd))
                check_payload(self._files, fd, len(head), header, payload_bytes)
            except RecordError as exc:
                return str(exc)
        return ""

    def _records(self, tenant: str | None) -> Iterator[Path]:
        root = self._layout.root
        for directory in self._files.list_directory(root):
            owner = None if directory.startswith(".") else tenant_of(directory)
            if owner is None or tenant not in (None, owner):
                continue
            for shard in filter(is_shard, self._names(root / directory)):
                for name in filter(is_record, self._names(root / directory / shard)):
                    yield root / directory / shard / name

    def _names(self, path: Path) -> list[str]:
        try:
            return self._files.list_directory(path)
        except _ABSENT:
            return []  # not a directory, or gone
