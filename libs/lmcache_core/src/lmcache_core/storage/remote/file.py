"""The remote tier in a directory that many processes and hosts share: a network file system, a
mounted bucket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from lmcache_core._typing import override
from lmcache_core.concurrency import run_together
from lmcache_core.config.options import directory_of_url
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.disk.files import DiskFiles
from lmcache_core.storage.disk.pool import FilePool
from lmcache_core.storage.remote.base import REMOTE_TIER, RemoteFigures, RemoteOptions, release_all
from lmcache_core.storage.remote.shared_directory import FoundRecord, SharedDirectory
from lmcache_core.storage.time_limit import caller_limit

NUM_THREADS = 8
"""File operations at once: enough to hide a network's delay."""
CLOSE_WAIT_S = 2.0

T = TypeVar("T")


def create(url: str, options: RemoteOptions) -> FileBackend:
    """The backend for a `file:///directory` URL.

    Raises:
        ConfigError: It is not one.
    """
    parts = urlsplit(url)
    try:
        path = directory_of_url(url)
    except UnicodeEncodeError:  # its text would repeat the URL
        raise ConfigError("remote url: no directory has such a name") from None
    if parts.netloc or not path.strip("/") or "\0" in path or parts.query or parts.fragment:
        raise ConfigError(
            "remote url: must be file:///directory, the absolute path of a directory that exists"
        )
    return FileBackend(Path(path), options)


class FileBackend(StorageBackend):
    """Chunks as files, one record each, in a directory without an owner.

    Any number of processes may write the same chunk at once: each writes a file of its own and
    renames it, and whichever comes last stays. Nothing is remembered between calls, nothing is
    locked, and nothing is evicted: how much the directory may hold is its operators' to see to, by
    a quota, or by removing files that were not read for long. The directory must exist; it is not
    made, so that a mount that is not there is an unavailable tier and not a full local disk.

    Args:
        root: The directory.
        options: Deadline of a call.
        files: How files are touched.
    """

    name = REMOTE_TIER

    def __init__(self, root: Path, options: RemoteOptions, files: DiskFiles | None = None) -> None:
        self._root = root
        self._timeout_s = options.timeout_s
        self._directory = SharedDirectory(root, files or DiskFiles())
        self._pool = FilePool("lmcache-files", NUM_THREADS)
        self._turns = asyncio.Semaphore(NUM_THREADS)
        self._figures = RemoteFigures()

    async def open(self) -> None:
        """Start the threads, and let one clear away what dead writers have left. The directory
        need not be there yet.
        """
        self._pool.open()
        self._pool.submit(self._directory.remove_stale)

    async def close(self) -> None:
        """Let running file operations end, for `CLOSE_WAIT_S` seconds. Idempotent."""
        await self._pool.close(CLOSE_WAIT_S)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks are there. One `stat` a chunk; the records are not read."""
        return await self._in_time(self._pool.run(self._directory.contains, keys))

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read chunks. Several files at once, each read straight into
        memory and verified in a thread.
        """
        self._pool.check_open()
        results: list[Result | None] = [None] * len(keys)
        try:
            async with caller_limit(timeout_s) as limit:
                await self._in_time(
                    run_together(self._get(i, key, allocate, results) for i, key in enumerate(keys))
                )
        except BaseException:
            release_all(results)
            raise
        late = Miss(MissReason.DEADLINE if limit.expired() else MissReason.UNAVAILABLE)
        answered = [late if result is None else result for result in results]
        self._figures.count_got(answered)
        self._figures.count_failed(answered)
        return answered

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Keep chunks. False when the directory takes no more, and for a
        while after that.
        """
        self._pool.check_open()
        kept = [False] * len(chunks)
        await self._in_time(
            run_together(self._put(i, chunk, kept) for i, chunk in enumerate(chunks))
        )
        self._figures.stored_chunks += sum(kept)
        return kept

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        return await self._in_time(self._pool.run(self._directory.remove, keys))

    @override
    async def clear(self, tenant: str | None = None) -> int:
        """Forget everything, for everybody who shares the directory. Walks it, without
        a deadline.
        """
        return await self._mapped(self._pool.run(self._directory.clear, tenant))

    def stats(self) -> dict[str, int]:
        """Figures of this process; how much the directory holds is its file system's to say."""
        return self._figures.as_stats()

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
        """Hands `found` and `memory` over to a thread, which lives on when nobody waits for it
        any more.
        """

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
        return await self._pool.result_of(reading, discard=_release)

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

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._mapped(work)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise UnavailableError(f"{self._root}: no answer within {self._timeout_s} s") from exc

    async def _mapped(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except OSError as exc:
            raise UnavailableError(f"{self._root}: {exc.strerror or exc}") from exc


def _close(found: FoundRecord | Miss) -> None:
    if isinstance(found, FoundRecord):
        found.close()


def _release(result: Result) -> None:
    if isinstance(result, Chunk):
        result.release()
