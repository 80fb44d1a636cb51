"""The tier in a bucket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager

from lmcache_core.concurrency import run_together
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory.base import MemoryObj
from lmcache_core.names import BUCKET_TIER
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.storage.base import StorageBackend, caller_limit
from lmcache_core.storage.disk.backoff import WriteBackoff
from lmcache_core.storage.disk.pool import FilePool
from lmcache_core.storage.unusable import UnusableRecords
from lmcache_core.telemetry import Counters
from typing_extensions import override

from lmcache_storage.s3.objects import BucketObjects, FoundObject

logger = logging.getLogger(__name__)

MAX_READS = 32
"""Concurrent requests that look up, read and remove: enough to hide a bucket's latency."""
MAX_WRITES = 4
CLOSE_WAIT_S = 2.0

_COUNTED = {
    MissReason.CORRUPT: "corrupt_chunks",
    MissReason.IDENTITY: "corrupt_chunks",
    MissReason.EXPIRED: "expired_chunks",
}
_REFUSED = frozenset({MissReason.CORRUPT, MissReason.IDENTITY, MissReason.UNAVAILABLE})
"""Misses of objects whose bytes were refused."""
_COUNTS = (
    "stored_chunks",
    "served_chunks",
    "served_bytes",
    "corrupt_chunks",
    "expired_chunks",
    "failed_reads",
    "failed_writes",
    "rejected_writes",
)


class S3Backend(StorageBackend):
    """Chunks as objects, one record each, in a bucket without an owner: any number of servers may
    share it, and nothing is locked.

    No state is kept between calls: the bucket is asked which chunks exist, by one HEAD each.
    Nothing is evicted: the size of the bucket is governed by its lifecycle rules. A chunk past
    `chunk_ttl_s` is a miss and is removed when it is next read.

    Requests block in threads, which end by themselves within the time limit of one request; a
    caller that gives up earlier does not wait for them.

    Args:
        timeout_s: Deadline of a contains, a get or a removal.
    """

    name = BUCKET_TIER

    def __init__(self, objects: BucketObjects, timeout_s: float) -> None:
        self._objects = objects
        self.where = objects.where
        self._timeout_s = timeout_s
        self._reading = FilePool("lmcache-s3-reads", MAX_READS)
        self._writing = FilePool("lmcache-s3-writes", MAX_WRITES)
        self._turns = asyncio.Semaphore(MAX_READS)
        self._backoff = WriteBackoff()
        self._unusable = UnusableRecords()
        self._counters = Counters()

    async def open(self) -> None:
        """Accept requests. The bucket need not be available yet.

        Raises:
            UnavailableError: The threads cannot be started.
        """
        try:
            self._reading.open()
            self._writing.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let running requests finish, for up to `CLOSE_WAIT_S` seconds, and end the others.
        Idempotent.
        """
        await asyncio.gather(self._reading.close(CLOSE_WAIT_S), self._writing.close(CLOSE_WAIT_S))
        self._objects.close()

    @property
    def refuses_writes(self) -> bool:
        """Return whether the last write failed although the bucket is reachable."""
        return self._backoff.is_failing

    async def probe(self) -> None:
        """Check that the bucket answers.

        Raises:
            UnavailableError: It does not.
        """
        async with self._limit():
            await self._reading.run(self._objects.probe)

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        # One HEAD per chunk, `MAX_READS` of them concurrently; the records are not read. One that
        # could not be used is absent, so that it is stored again.
        found = [False] * len(keys)

        async def ask(i: int, key: ChunkKey) -> None:
            async with self._turns:
                found[i] = await self._reading.run(self._objects.contains, key)

        async with self._limit():
            await run_together(
                ask(i, key) for i, key in enumerate(keys) if key not in self._unusable
            )
        return found

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Read several objects concurrently, each straight into memory and verified in a thread.

        An object that cannot be read is a miss; if no object can be read, the tier is unavailable.
        """
        self._reading.check_open()
        results: list[Result | None] = [None] * len(keys)
        failures: list[UnavailableError] = []
        try:
            async with caller_limit(timeout_s) as limit, self._limit():
                await run_together(
                    self._get(i, key, allocate, results, failures) for i, key in enumerate(keys)
                )
        except BaseException:
            release_all(results)
            raise
        if keys and len(failures) == len(keys):
            raise failures[0]
        late = Miss(MissReason.DEADLINE if limit.expired() else MissReason.UNAVAILABLE)
        answered = [late if result is None else result for result in results]
        for result in answered:
            if isinstance(result, Chunk):
                self._counters.add("served_chunks")
                self._counters.add("served_bytes", result.num_bytes)
            elif result.reason in _COUNTED:
                self._counters.add(_COUNTED[result.reason])
        return answered

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Write chunks. False if the bucket refuses writes although it is reachable, and for a
        while after that.
        """
        self._writing.check_open()
        kept = [False] * len(chunks)
        if not chunks or not self._backoff.allows():
            self._counters.add("rejected_writes", len(chunks))
            return kept
        failures: list[UnavailableError] = []
        await run_together(self._put(i, chunk, kept, failures) for i, chunk in enumerate(chunks))
        self._counters.add("stored_chunks", sum(kept))
        self._counters.add("failed_writes", len(failures))
        if not failures:
            if self._backoff.succeeded():
                logger.info("tier accepts writes again: tier=%s", self.name)
            return kept
        # Raises if more than writes fail: the breaker then bypasses the whole tier.
        await self.probe()
        if self._backoff.failed():
            logger.warning(
                "tier refuses writes, skipping them for a while: tier=%s error=%s",
                self.name,
                failures[0],
            )
        return kept

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        removed = [False] * len(keys)

        async def remove(i: int, key: ChunkKey) -> None:
            async with self._turns:
                removed[i] = await self._reading.run(self._objects.remove, key)

        async with self._limit():
            await run_together(remove(i, key) for i, key in enumerate(dict.fromkeys(keys)))
        return sum(removed)

    @override
    async def clear(self, tenant: str | None = None) -> int:
        """Clear the bucket for all servers that share it. Lists it, without a deadline."""
        return await self._reading.run(self._objects.clear, tenant)

    @override
    def stats(self) -> dict[str, int]:
        """Return figures of this process; only the bucket knows how much it holds."""
        counted = {name: value for (name, _), value in self._counters.snapshot().items()}
        sizes = {"num_chunks": 0, "used_bytes": 0, "capacity_bytes": 0}
        return (
            sizes
            | {name: counted.get(name, 0) for name in _COUNTS}
            | {"is_failing": int(self._backoff.is_failing)}
        )

    async def _get(
        self,
        place: int,
        key: ChunkKey,
        allocate: Allocate,
        results: list[Result | None],
        failures: list[UnavailableError],
    ) -> None:
        async with self._turns:
            try:
                result = results[place] = await self._find(key, allocate)
                if isinstance(result, Chunk):
                    self._unusable.forget([key])
                elif result.reason in _REFUSED:
                    self._unusable.note(key)
                if result == Miss(MissReason.UNAVAILABLE):
                    self._counters.add("failed_reads")
            except UnavailableError as exc:
                failures.append(exc)
                self._counters.add("failed_reads")
                results[place] = Miss(MissReason.UNAVAILABLE)

    async def _find(self, key: ChunkKey, allocate: Allocate) -> Result:
        found = await self._reading.run(self._objects.find, key, discard=_close)
        if isinstance(found, Miss):
            return found
        memory = None
        try:
            memory = allocate(found.payload_bytes)
        finally:
            if memory is None:
                found.close()
        return Miss(MissReason.NO_MEMORY) if memory is None else await self._read(found, memory)

    async def _read(self, found: FoundObject, memory: MemoryObj) -> Result:
        """Pass `found` and `memory` to a thread, which may outlive its caller."""

        def give_back(reading: Future[Result] | None) -> None:
            if reading is None or reading.cancelled():
                found.close()
                memory.ref_count_down()

        try:
            reading = self._reading.submit(self._objects.read, found, memory)
        except BaseException:
            give_back(None)
            raise
        reading.add_done_callback(give_back)
        return await self._reading.result_of(reading, discard=_release)

    async def _put(
        self, place: int, chunk: Chunk, kept: list[bool], failures: list[UnavailableError]
    ) -> None:
        chunk.memory.ref_count_up()
        try:
            writing = self._writing.submit(self._objects.write, chunk)
        except BaseException:
            chunk.release()
            raise
        writing.add_done_callback(lambda _: chunk.release())
        try:
            await self._writing.result_of(writing)
            self._unusable.forget([chunk.key])
            kept[place] = True
        except UnavailableError as exc:
            failures.append(exc)

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        """Bound the body by a deadline, raised as `UnavailableError`."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                yield
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise UnavailableError(
                f"{self._objects.where}: no answer within {self._timeout_s} s"
            ) from exc


def _close(found: FoundObject | Miss) -> None:
    if isinstance(found, FoundObject):
        found.close()


def _release(result: Result) -> None:
    if isinstance(result, Chunk):
        result.release()
