"""The disk tier: a bounded pool of threads over `DiskStore`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from lmcache_core._typing import override
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.names import DISK_TIER
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import OnRemoved, StorageBackend
from lmcache_core.storage.disk.backoff import WriteBackoff
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.index import DiskEntry, DiskIndex
from lmcache_core.storage.disk.layout import DiskLayout
from lmcache_core.storage.disk.lock import DirectoryLock
from lmcache_core.storage.disk.pool import ChunkJob, FilePool, finish, wait_all
from lmcache_core.storage.disk.store import DiskStore
from lmcache_core.storage.eviction import Clock, EvictionPolicy, TierLimits, create_policy

logger = logging.getLogger(__name__)

DEFAULT_NUM_THREADS = 4
LOAD_WAIT_S = 1.0
"""How long `open` waits for the directory to be read; then it is read in the background."""
ACQUIRE_WAIT_S = 5.0
"""How long `open` waits for the directory to be created and locked."""
CLOSE_WAIT_S = 10.0
LOOK_AGAIN_S = 10.0
"""Interval between retries of unreadable files; longer if a retry takes longer."""
LOOK_AGAIN_SHARE = 0.05
"""Largest part of a thread's time spent on these retries."""


class DiskBackend(StorageBackend):
    """Chunks in a directory that one process owns. Complete records survive any kind of process
    exit.

    A disk that is full, read-only or failing causes misses and refused writes, and is retried
    automatically. Until the directory has been read after a start, its chunks are misses and writes
    are refused.

    Args:
        root: The directory; created if missing.
        capacity_bytes: Hard bound on its content, half-written files included.
        policy: Eviction order; see `eviction.DEFAULT_POLICY`. Must not be shared with another tier.
        on_removed: Called on the loop with every key that the tier drops.
        fsync: Wait for the device before a chunk counts as stored. Without it, a power failure may
            cost recent chunks, which are then misses.
        num_threads: Bound on concurrent file operations.
        clock: Seconds since the epoch, for the age of chunks. Files found at the start are dated by
            their modification times.
        monotonic: Seconds, monotonic, for the pauses after writes that the disk refused.

    Attributes:
        on_restored: Called on the loop whenever chunks become available that were unreadable
            before, or whose write had been abandoned.

    Raises:
        ConfigError: The capacity is not positive.
    """

    name = DISK_TIER

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        policy: EvictionPolicy | None = None,
        on_removed: OnRemoved | None = None,
        fsync: bool = False,
        num_threads: int = DEFAULT_NUM_THREADS,
        files: DiskFiles | None = None,
        *,
        limits: TierLimits | None = None,
        clock: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        if capacity_bytes <= 0:
            raise ConfigError(
                f"disk tier {root}: capacity of {capacity_bytes} bytes; it must be positive"
            )
        self._layout = DiskLayout(root)
        self._files = files or DiskFiles()
        self._index = DiskIndex(capacity_bytes, policy or create_policy(), limits, clock, monotonic)
        self._lock = DirectoryLock(self._layout.lock)
        self._store = DiskStore(
            self._layout,
            self._index,
            self._files,
            self._report,
            fsync,
            self._lock,
            WriteBackoff(monotonic),
        )
        self._pool = FilePool("lmcache-disk", num_threads)
        self._on_removed = on_removed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._acquiring: Future[None] | None = None
        self._loading: Future[None] | None = None
        self._has_opened = asyncio.Event()
        self._tasks = TaskSupervisor(self._pool.name)
        self.on_restored: Callable[[], None] | None = None

    async def open(self) -> None:
        """Lock the directory and read it, for `LOAD_WAIT_S` seconds here and then in the
        background.

        Raises:
            ConfigError: Another process owns it.
            UnavailableError: It cannot be created, locked or read.
        """
        self._loop = asyncio.get_running_loop()
        self._pool.open()
        try:
            # A hanging disk blocks its thread: the next `open` waits for that thread and adds none.
            if self._acquiring is None or self._acquiring.done():
                self._acquiring = self._pool.submit(self._acquire)
            async with asyncio.timeout(ACQUIRE_WAIT_S):
                await self._pool.result_of(self._acquiring)
            self._loading = self._pool.submit(self._store.load)
            await wait_all([self._loading], LOAD_WAIT_S)
            if self._loading.done():
                self._loading.result()
            else:
                self._loading.add_done_callback(_log_failure)
        except OSError as exc:  # includes timeouts
            await self._close(0.0)
            raise UnavailableError(
                f"disk path {self._layout.root}: {exc.strerror or 'no answer'}"
            ) from exc
        except BaseException:
            await self.close()
            raise
        self._has_opened.set()
        self._tasks = TaskSupervisor(self._pool.name)
        self._tasks.start("look-again", self._look_again())

    async def close(self) -> None:
        """Let running file operations finish, for up to `CLOSE_WAIT_S` seconds, and unlock the
        directory. Idempotent.
        """
        await self._close(CLOSE_WAIT_S)

    async def wait_loaded(self) -> None:
        """Wait until the tier is open and its directory has been read, or reading it has failed."""
        await self._has_opened.wait()
        if self._loading is not None:
            await wait_all([self._loading])

    @property
    @override
    def num_written(self) -> int:
        return self._store.num_written

    @override
    def contains_now(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._index.contains_many(keys)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._index.contains_many(keys)

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks. Worker threads read files straight into memory from `allocate` and verify
        them.
        """
        self._pool.check_open()
        results: list[Result] = []
        jobs: dict[int, ChunkJob[Result]] = {}
        entries = self._index.find_many(keys)
        if Miss(MissReason.EXPIRED) in entries:
            self._pool.submit(self._store.expire)
        for i, (key, entry) in enumerate(zip(keys, entries, strict=True)):
            memory = None if isinstance(entry, Miss) else allocate(entry.payload_bytes)
            if isinstance(entry, Miss):
                results.append(entry)
            elif memory is None:
                results.append(Miss(MissReason.NO_MEMORY))
            else:
                results.append(Miss(MissReason.DEADLINE))
                jobs[i] = self._pool.begin(
                    self._store.read, key, entry, memory, unrun=memory.ref_count_down
                )
        try:
            await finish(jobs.values(), timeout_s)
        except BaseException:
            for job in jobs.values():
                job.abandon()
            raise
        for i, job in jobs.items():
            results[i] = job.take(Miss(MissReason.DEADLINE), Miss(MissReason.UNAVAILABLE))
        return results

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store chunks. Also returns False while the disk refuses writes."""
        if not self._store.is_loaded:
            return [False] * len(chunks)
        futures = [self._submit_write(chunk) for chunk in chunks]
        try:
            await wait_all(futures)
        except BaseException:
            for future in futures:
                # A job that has begun keeps its chunk's memory until it ends: the disk may still
                # read it.
                if not future.cancel() and not future.done():
                    future.add_done_callback(self._written_late)
            raise
        return [not future.cancelled() and future.result() for future in futures]

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        return await self._when_loaded(lambda: self._store.remove(keys))

    @override
    async def clear(self, tenant: str | None = None) -> int:
        return await self._when_loaded(lambda: self._store.clear(tenant))

    def held(self) -> list[tuple[ChunkKey, int]]:
        """Return name and size (whole record, bytes) of every chunk that would be served now."""
        return self._index.held()

    def peek_many(self, keys: Sequence[ChunkKey]) -> list[DiskEntry | Miss]:
        """Return what is known about chunks without touching a file or counting an access;
        `corrupt` for a chunk that was found damaged and set aside.
        """
        return self._index.peek_many(keys)

    @override
    def stats(self) -> dict[str, int]:
        is_loading = self._loading is not None and not self._loading.done()
        return self._store.stats() | {"is_loading": int(is_loading)}

    def check_integrity(self) -> None:
        """Check the tier's accounting.

        Raises:
            IntegrityError: The totals do not add up.
        """
        self._index.check_integrity()

    async def _close(self, wait_s: float) -> None:
        await self._tasks.close()
        if await self._pool.close(wait_s):
            self._lock.release()
        elif self._acquiring is not None and self._acquiring.done():
            logger.warning(
                "disk does not answer, directory stays locked until this process ends: path=%s",
                self._layout.root,
            )

    def _acquire(self) -> None:
        self._files.make_directory(self._layout.root)
        self._lock.acquire()

    def _submit_write(self, chunk: Chunk) -> Future[bool]:
        self._pool.check_open()
        chunk.memory.ref_count_up()
        try:
            future = self._pool.submit(self._store.write, chunk)
        except BaseException:
            chunk.release()
            raise
        future.add_done_callback(lambda _: chunk.release())
        return future

    async def _look_again(self) -> None:
        await self.wait_loaded()
        pause_s = LOOK_AGAIN_S
        while True:
            await asyncio.sleep(pause_s)
            if not self._store.has_unread:
                continue
            began = time.monotonic()
            has_restored = False
            with contextlib.suppress(OSError):  # logged on the first failure
                has_restored = await self._pool.run(self._store.look_again)
            if has_restored:
                self._report_restored()
            pause_s = max(LOOK_AGAIN_S, (time.monotonic() - began) / LOOK_AGAIN_SHARE)

    def _written_late(self, future: Future[bool]) -> None:
        """Report a chunk whose write was abandoned and has finished since."""
        if self._loop is not None and future.exception() is None and future.result():
            with contextlib.suppress(RuntimeError):  # the loop has stopped: there is no listener
                self._loop.call_soon_threadsafe(self._report_restored)

    def _report_restored(self) -> None:
        if self.on_restored is not None:
            self.on_restored()

    async def _when_loaded(self, work: Callable[[], int]) -> int:
        self._pool.check_open()
        await self.wait_loaded()
        self._pool.check_open()
        if not self._store.is_loaded:  # existing records are served once it can be read
            raise UnavailableError(f"disk path {self._layout.root}: the directory cannot be read")
        return await self._pool.run(work)

    def _report(self, key: ChunkKey) -> None:
        if self._on_removed is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has stopped: there is no listener
                self._loop.call_soon_threadsafe(self._on_removed, key)


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (failure := future.exception()) is not None:
        logger.error(
            "cannot read the disk tier's directory, storing nothing until it can: error=%r", failure
        )
